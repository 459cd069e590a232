"""Beam search with all that may change or end a beam, written down plainly over the logits of `transformers`: whole
vocabularies, whole texts, no cache of anything. What the engine finds must equal it.
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyvllm import SamplingParams

NEVER = float("-inf")


@dataclass(kw_only=True)
class Beam:
    """A line of tokens; `score` is what it is ranked by, once it has ended."""

    tokens: list[int] = field(default_factory=list)
    cumulative: Tensor = field(default_factory=lambda: torch.zeros(()))
    logprobs: list[dict[int, tuple[float, int]]] = field(default_factory=list)
    """For each token, if they are wanted: the model's own log-probabilities and ranks of it and of the best ones."""
    score: float = NEVER
    text: str = ""
    finish: tuple[str, int | str | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """What it must know of a model and its engine."""

    model: Any
    pieces: Sequence[bytes]
    """What each token adds to a text; nothing for special ones."""
    eos: Sequence[int]
    max_model_len: int
    bad_word_ids: Callable[[Sequence[str]], list[list[int]]]

    def search(self, prompt: list[int], params: SamplingParams) -> tuple[list[Beam], float]:
        """The beams to return, best first, and the least distance of two candidates that were ordered by score."""
        width = params.best_of or params.n
        stops = list(dict.fromkeys([*(() if params.ignore_eos else self.eos), *(params.stop_token_ids or ())]))
        most = min(params.max_tokens or self.max_model_len, self.max_model_len - len(prompt))
        running, ended, closest = [Beam()], list[Beam](), float("inf")
        for length in range(1, most + 1):
            count = width * max(2, 1 + len(stops))
            seen = self._candidates(prompt, running, stops, params, count + 1)
            closest = min([closest, *(float(a[0] - b[0]) for a, b in itertools.pairwise(seen))])
            survivors = list[Beam]()
            for place, (cumulative, parent, token, logprobs) in enumerate(seen[:count]):
                beam = Beam(
                    tokens=[*parent.tokens, token], cumulative=cumulative, logprobs=[*parent.logprobs, logprobs]
                )
                self._end(prompt, beam, stops, params, length == most)
                if beam.finish is None:
                    survivors.append(beam)
                elif place < width:
                    beam.score = beam.cumulative.item() / length**params.length_penalty
                    ended = sorted([*ended, beam], key=lambda beam: -beam.score)[:width]
            running = survivors[:width]
            if not running or (len(ended) == width and params.early_stopping is True):
                break
            reached = most if params.early_stopping == "never" and params.length_penalty > 0 else length
            possible = running[0].cumulative.item() / reached**params.length_penalty
            if len(ended) == width:
                closest = min(closest, abs(possible - ended[-1].score))
                if possible <= ended[-1].score:
                    break
        return ended[: params.n], closest

    def _candidates(
        self, prompt: list[int], running: list[Beam], stops: list[int], params: SamplingParams, count: int
    ) -> list[tuple[Tensor, Beam, int, dict[int, tuple[float, int]]]]:
        """The best `count` continuations: cumulative score, beam, token, and what `logprobs` tells of it."""
        logits = self.model(torch.tensor([prompt + beam.tokens for beam in running])).logits[:, -1].float()
        rows = zip(running, logits, strict=True)
        values = torch.stack([self._values(prompt, beam, row.clone(), stops, params) for beam, row in rows])
        totals = (torch.stack([beam.cumulative for beam in running])[:, None] + values).flatten()
        found = []
        for place in totals.sort(descending=True, stable=True).indices[:count].tolist():
            row, token = divmod(place, logits.shape[1])
            if totals[place] > NEVER:
                found.append((totals[place], running[row], token, self._told(logits[row], token, params)))
        return found

    def _told(self, logits: Tensor, token: int, params: SamplingParams) -> dict[int, tuple[float, int]]:
        if params.logprobs is None:
            return {}
        own = logits.log_softmax(-1)
        best = own.sort(descending=True, stable=True).indices[: params.logprobs].tolist()
        return {i: (own[i].item(), int((own > own[i]).sum()) + 1) for i in (token, *best)}

    def _values(
        self, prompt: list[int], beam: Beam, logits: Tensor, stops: list[int], params: SamplingParams
    ) -> Tensor:
        """What a beam's next tokens add to its score."""
        for function in params.logits_processors or ():
            assert callable(function)
            logits = function(beam.tokens, logits)
        values = logits.log_softmax(-1)
        for token, bias in (params.logit_bias or {}).items():
            values[token] += bias
        for token in set(beam.tokens) | (set(prompt) if params.repetition_penalty != 1 else set()):
            value, count = values[token], beam.tokens.count(token)
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
            values[token] = value - params.frequency_penalty * count - params.presence_penalty * (count > 0)
        for *before, last in self.bad_word_ids(params.bad_words or []):
            if beam.tokens[len(beam.tokens) - len(before) :] == before:
                values[last] = NEVER
        if len(beam.tokens) < params.min_tokens:
            values[stops] = NEVER
        if params.allowed_token_ids is not None:
            values[[i for i in range(len(values)) if i not in params.allowed_token_ids]] = NEVER
        if params.structured_outputs is not None:
            assert params.structured_outputs.choice is not None
            said = b"".join(self.pieces[i] for i in beam.tokens)
            choices = [choice.encode() for choice in params.structured_outputs.choice]
            for token, piece in enumerate(self.pieces):
                fits = any(choice.startswith(said + piece) for choice in choices) and piece != b""
                if not fits and not (token in self.eos and said in choices):
                    values[token] = NEVER
        return values

    def _end(self, prompt: list[int], beam: Beam, stops: list[int], params: SamplingParams, is_last: bool) -> None:
        """Give a beam its text, and find out whether its last token ends it, and why."""
        *before, last = beam.tokens
        early = len(beam.tokens) <= params.min_tokens
        is_end = last in stops and not early
        is_own = is_end and not params.ignore_eos and last == self.eos[0]
        shown = before if is_end and (is_own or not params.include_stop_str_in_output) else beam.tokens
        beam.text = self._text(prompt, shown, final=is_end)
        if is_end:
            beam.finish = ("stop", None if is_own else last)
            return
        floor = len(self._text(prompt, beam.tokens[: params.min_tokens])) if params.min_tokens else 0
        patterns = [(False, re.escape(stop), stop) for stop in params.stop or ()]
        patterns += [(True, stop, stop) for stop in params.stop_regex or ()]
        found = []
        for place, (is_regex, pattern, stop) in enumerate(patterns):
            match = re.compile(pattern).search(beam.text, floor)
            if match and not early:
                # What ends first; of those that end together strings before expressions, which go by their beginning.
                order = (match.end(), is_regex, match.start() if is_regex else place)
                found.append((order, match.start(), stop))
        if found:
            (end, *_), start, stop = min(found)
            beam.text = beam.text[: end if params.include_stop_str_in_output else start]
            beam.finish = ("stop", stop)
        elif params.structured_outputs is not None and self._is_whole(beam, params.structured_outputs.choice):
            beam.finish = ("stop", None)
        elif is_last:
            beam.finish = ("length", None)
        if beam.finish and not found:
            beam.text = self._text(prompt, beam.tokens, final=True)

    def _is_whole(self, beam: Beam, choices: Sequence[str] | None) -> bool:
        """Whether nothing can follow that still is one of the choices."""
        said = b"".join(self.pieces[i] for i in beam.tokens)
        fitting = [choice.encode() for choice in choices or () if choice.encode().startswith(said)]
        return beam.tokens[-1] in self.eos or fitting == [said]

    def _text(self, prompt: list[int], tokens: list[int], *, final: bool = False) -> str:
        """What the tokens add to the prompt's text; bytes that are no whole character yet come only at the end."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(self.pieces[i] for i in prompt))
        return decoder.decode(b"".join(self.pieces[i] for i in tokens), final)
