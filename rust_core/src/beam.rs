//! Beam search, as transformers does it: same candidates, same order, same stopping, float32 scores.
//!
//! Each step every running beam offers its best `candidates` tokens. Of all offers the best K = width × max(2, 1 +
//! stop ids) are looked at, best first: those that end a sequence become hypotheses if they are among the first
//! `width`; the first `width` others run on. A hypothesis' score is its cumulative log-probability over its length
//! (generated tokens, a final stop token included) to the power of the length penalty.

use crate::block_manager::BlockManager;
use crate::detokenizer::Vocabulary;
use crate::output::{Completion, FinishReason};
use crate::request::{EarlyStopping, OutputKind};
use crate::sequence::{Group, History, Request, Sequence, Sequences};

/// An ended beam.
#[derive(Clone, Debug)]
pub struct Hypothesis {
    /// Cumulative log-probability over length to the power of the length penalty.
    pub score: f32,
    /// What it said.
    pub history: History,
}

/// State of a beam group besides its running beams, which are the group's sequences, best first.
#[derive(Clone, Debug)]
pub struct BeamSearch {
    width: usize,
    /// At most `width` ended beams, best first.
    pub hypotheses: Vec<Hypothesis>,
    /// Of each result, best first: bytes of text and tokens that were told before the end.
    pub told: Vec<(usize, usize)>,
}

/// What one beam's row offers: its best tokens with what they add to its score, and what is told of them.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// Token ids, best first.
    pub token_ids: &'a [i32],
    /// Their log-probabilities after bias, penalties and masks; not finite for what cannot follow.
    pub logprobs: &'a [f32],
    /// Their log-probabilities and ranks as the request wants them told, if these are others.
    pub told: Option<(&'a [f32], &'a [i32])>,
    /// Best tokens and log-probabilities of the row (columns from 1), if the request wants them.
    pub top: Option<(&'a [i32], &'a [f32])>,
}

/// Why a search cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stuck {
    /// Its grammar takes too much work, or does not take a token.
    Grammar(String),
    /// No beam has a token that may follow, and none has ended.
    NothingFollows,
}

struct Candidate {
    score: f32,
    parent: usize,
    rank: usize,
}

/// A candidate with its token taken in.
struct Taken {
    parent: usize,
    history: History,
}

impl BeamSearch {
    /// The state before the first step.
    pub fn new(width: usize) -> Self {
        Self { width, hypotheses: Vec::new(), told: Vec::new() }
    }

    /// What can be told of a search that goes on: how many results there are to be, as far as is known, and the bytes
    /// of text and tokens that all of them begin with, whatever comes. That is what all that may become one of the `n`
    /// best have in common. None if that was told.
    pub fn news(&self, sequences: &[Sequence], request: &Request) -> Option<(usize, (usize, usize))> {
        let n = request.params.n as usize;
        let ended = self.hypotheses.iter().take(n).map(|hypothesis| &hypothesis.history);
        let mut all = sequences.iter().map(|sequence| &sequence.history).chain(ended);
        let count = n.min(sequences.len() + self.hypotheses.len());
        let (known_text, known_tokens) = self.told.first().copied().unwrap_or_default();
        let first = all.next()?;
        let mut text = first.visible_text(request).get(known_text..)?;
        let mut tokens = first.output.get(known_tokens..)?;
        for other in all {
            let other_text = other.visible_text(request).get(known_text..)?;
            let chars = text.chars().zip(other_text.chars()).take_while(|(a, b)| a == b);
            text = &text[..chars.map(|(character, _)| character.len_utf8()).sum()];
            let others = other.output.get(known_tokens..)?;
            tokens = &tokens[..tokens.iter().zip(others).take_while(|(a, b)| a == b).count()];
        }
        let certain = (known_text + text.len(), known_tokens + tokens.len());
        let is_new = certain != (0, 0) && (self.told.len() < count || self.told[0] != certain);
        is_new.then_some((count, certain))
    }

    /// What a search tells: its results if it has `finished`, until then what they all begin with, if there is news of
    /// that. One that was ended by an error while it had beams running tells what was told before.
    pub fn completions(&mut self, sequences: &[Sequence], request: &Request, finished: bool) -> Vec<Completion> {
        let n = request.params.n as usize;
        if !finished {
            return self.tell_certain(sequences, request);
        }
        let best = self.hypotheses.iter().take(n).map(|hypothesis| &hypothesis.history).enumerate();
        let whole = |(i, history): (usize, &History)| {
            let part = self.part(i, history, (history.text.len(), history.output.len()), request);
            let (reason, stop) = history.finish.clone().unzip();
            Completion {
                cumulative_logprob: Some(history.cumulative_logprob),
                finish_reason: reason,
                stop_reason: stop.flatten(),
                ..part
            }
        };
        let (mut parts, reason): (Vec<_>, _) = match sequences.first() {
            None => (best.map(whole).collect(), FinishReason::Abort),
            Some(_) => (Vec::new(), FinishReason::Error),
        };
        // Results that had begun, but whose last beams had no token to go on with.
        let histories = sequences.iter().map(|sequence| &sequence.history);
        let known = histories.chain(self.hypotheses.iter().map(|hypothesis| &hypothesis.history)).next();
        let count = if sequences.is_empty() { self.told.len() } else { n };
        for i in parts.len()..count {
            let told = self.told.get(i).copied().unwrap_or_default();
            let part = known.map(|history| self.part(i, history, told, request));
            parts.extend(part.map(|part| Completion { finish_reason: Some(reason), ..part }));
        }
        parts
    }

    fn tell_certain(&mut self, sequences: &[Sequence], request: &Request) -> Vec<Completion> {
        let Some((count, certain)) = self.news(sequences, request) else { return Vec::new() };
        let Some(running) = sequences.first() else { return Vec::new() };
        let parts = (0..count).map(|i| self.part(i, &running.history, certain, request)).collect();
        self.told.resize(count.max(self.told.len()), certain);
        self.told.iter_mut().take(count).for_each(|told| *told = certain);
        parts
    }

    /// The first `(bytes of text, tokens)` of a result; of these, for delta outputs, what has not been told.
    fn part(&self, index: usize, history: &History, (text, tokens): (usize, usize), request: &Request) -> Completion {
        let is_delta = request.params.output_kind == OutputKind::Delta;
        let told = self.told.get(index).copied().filter(|_| is_delta);
        let (text_from, tokens_from) = told.unwrap_or_default();
        Completion {
            index,
            text: history.text[text_from..text].to_owned(),
            token_ids: history.output[tokens_from..tokens].to_vec(),
            cumulative_logprob: None,
            logprobs: history.logprobs.as_ref().map(|table| table.range(tokens_from, tokens)),
            finish_reason: None,
            stop_reason: None,
        }
    }

    fn add(&mut self, score: f32, history: History) {
        let at = self.hypotheses.partition_point(|known| known.score >= score);
        self.hypotheses.insert(at, Hypothesis { score, history });
        self.hypotheses.truncate(self.width);
    }

    fn is_full(&self) -> bool {
        self.hypotheses.len() == self.width
    }
}

/// `length` to the power of the penalty, in transformers' precision.
fn normalizer(length: usize, penalty: f64) -> f32 {
    (length as f64).powf(penalty) as f32
}

/// Take in one step of a beam group: its offers are in the order of its sequences. Returns true when the search has
/// ended; the group's sequences then hold no blocks, and the hypotheses, at least one, are the result. Fails, without
/// changing a sequence, if a grammar cannot be followed, or if nothing may follow and no hypothesis is there.
pub fn advance(
    group: &mut Group,
    offers: &[Offer],
    blocks: &mut BlockManager,
    vocabulary: Option<&Vocabulary>,
) -> Result<bool, Stuck> {
    let Group { request, sequences, beam: Some(beam), .. } = group else { return Ok(true) };
    let length = sequences[0].history.output.len() + 1;
    let penalty = request.params.length_penalty;
    let early = request.params.early_stopping;
    let mut survivors: Vec<Taken> = Vec::with_capacity(beam.width);
    for (place, candidate) in best_candidates(sequences, offers, beam.width, request).into_iter().enumerate() {
        if survivors.len() == beam.width {
            break;
        }
        let mut taken = take(&candidate, sequences, offers, request, vocabulary);
        if let Some(why) = taken.history.grammar_error.take() {
            return Err(Stuck::Grammar(why));
        }
        if taken.history.finish.is_none() {
            survivors.push(taken);
        } else if place < beam.width {
            beam.add(candidate.score / normalizer(length, penalty), taken.history);
        }
    }
    if survivors.is_empty() && beam.hypotheses.is_empty() {
        return Err(Stuck::NothingFollows);
    }
    let best_running = survivors.first().map(|taken| taken.history.cumulative_logprob);
    let longest = if early == EarlyStopping::Never && penalty > 0.0 { request.max_output } else { length };
    let can_improve = |best: f32| {
        let possible = best / normalizer(longest, penalty);
        !beam.is_full() || beam.hypotheses.iter().any(|worst| possible > worst.score)
    };
    let ended = !best_running.is_some_and(can_improve) || (early == EarlyStopping::Always && beam.is_full());
    replace(sequences, if ended { Vec::new() } else { survivors }, blocks);
    Ok(ended)
}

/// The best K continuations over all beams, best first; equal ones by beam, then by the row's order.
fn best_candidates(sequences: &[Sequence], offers: &[Offer], width: usize, request: &Request) -> Vec<Candidate> {
    let mut all: Vec<Candidate> = Vec::new();
    for (parent, (sequence, offer)) in sequences.iter().zip(offers).enumerate() {
        let finite = offer.logprobs.iter().enumerate().filter(|(_, logprob)| logprob.is_finite());
        let sum = sequence.history.cumulative_logprob;
        all.extend(finite.map(|(rank, &logprob)| Candidate { score: sum + logprob, parent, rank }));
    }
    all.sort_by(|a, b| b.score.total_cmp(&a.score));
    all.truncate(width * (1 + request.stop_tokens.len()).max(2));
    all
}

fn take(
    candidate: &Candidate,
    sequences: &[Sequence],
    offers: &[Offer],
    request: &Request,
    vocabulary: Option<&Vocabulary>,
) -> Taken {
    let Candidate { parent, rank, score } = *candidate;
    let offer = &offers[parent];
    let mut history = sequences[parent].history.clone();
    history.cumulative_logprob = score;
    if let Some(table) = &mut history.logprobs {
        let (logprob, place) = if let Some((logprobs, ranks)) = offer.told {
            (logprobs[rank], ranks[rank])
        } else {
            let own = offer.logprobs[rank];
            (own, 1 + offer.logprobs.partition_point(|&better| better > own) as i32)
        };
        let (mut token_ids, mut logprobs) = (vec![offer.token_ids[rank]], vec![logprob]);
        if let Some((top_ids, top_logprobs)) = offer.top {
            token_ids.extend_from_slice(top_ids);
            logprobs.extend_from_slice(top_logprobs);
        }
        table.push(&token_ids, &logprobs, place);
    }
    history.accept(offer.token_ids[rank] as u32, request, vocabulary);
    Taken { parent, history }
}

/// The survivors become the group's sequences: each takes its parent's table, or a fork of it if others need it too.
fn replace(sequences: &mut Sequences, survivors: Vec<Taken>, blocks: &mut BlockManager) {
    let mut parents: Vec<Option<Sequence>> = sequences.drain(..).map(Some).collect();
    let mut uses = vec![0; parents.len()];
    for taken in &survivors {
        uses[taken.parent] += 1;
    }
    for (parent, _) in uses.iter().enumerate().filter(|(_, uses)| **uses == 0) {
        if let Some(parent) = parents[parent].take() {
            blocks.release(parent.table);
        }
    }
    for taken in survivors {
        uses[taken.parent] -= 1;
        let Some(parent) = &parents[taken.parent] else { continue };
        let mut child = if uses[taken.parent] > 0 {
            Sequence {
                table: blocks.fork(&parent.table),
                num_computed_tokens: parent.num_computed_tokens,
                hashes: parent.hashes.clone(),
                num_published: parent.num_published,
                ..Sequence::default()
            }
        } else {
            parents[taken.parent].take().unwrap_or_default()
        };
        child.history = taken.history;
        sequences.push(child);
    }
}
