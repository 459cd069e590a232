//! Beam search, as transformers does it: same candidates, same order, same stopping, float32 scores.
//!
//! Each step every running beam offers its best `candidates` tokens. Of all offers the best K = width × max(2, 1 +
//! stop ids) are looked at, best first: those that end a sequence become hypotheses if they are among the first
//! `width`; the first `width` others run on. A hypothesis' score is its cumulative log-probability over its length
//! (generated tokens, a final stop token included) to the power of the length penalty.

use crate::block_manager::BlockManager;
use crate::detokenizer::Vocabulary;
use crate::request::EarlyStopping;
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

/// What one beam's row offers: its best tokens with their log-probabilities, and the row's log-probability table.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// Token ids, best first.
    pub token_ids: &'a [i32],
    /// Their log-probabilities.
    pub logprobs: &'a [f32],
    /// Best tokens and log-probabilities of the row (columns from 1), if the request wants them.
    pub top: Option<(&'a [i32], &'a [f32])>,
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
/// ended; the group's sequences then hold no blocks, and the hypotheses are the result.
pub fn advance(
    group: &mut Group,
    offers: &[Offer],
    blocks: &mut BlockManager,
    vocabulary: Option<&Vocabulary>,
) -> bool {
    let Group { request, sequences, beam: Some(beam), .. } = group else { return true };
    let length = sequences[0].history.output.len() + 1;
    let penalty = request.params.length_penalty;
    let early = request.params.early_stopping;
    let mut survivors: Vec<Taken> = Vec::with_capacity(beam.width);
    for (place, candidate) in best_candidates(sequences, offers, beam.width, request).into_iter().enumerate() {
        if survivors.len() == beam.width {
            break;
        }
        let taken = take(&candidate, sequences, offers, request, vocabulary);
        if taken.history.finish.is_none() {
            survivors.push(taken);
        } else if place < beam.width {
            beam.add(candidate.score / normalizer(length, penalty), taken.history);
        }
    }
    let best_running = survivors.first().map(|taken| taken.history.cumulative_logprob);
    let longest = if early == EarlyStopping::Never && penalty > 0.0 { request.max_output } else { length };
    let can_improve = |best: f32| {
        let possible = best / normalizer(longest, penalty);
        !beam.is_full() || beam.hypotheses.iter().any(|worst| possible > worst.score)
    };
    let ended = !best_running.is_some_and(can_improve) || (early == EarlyStopping::Always && beam.is_full());
    replace(sequences, if ended { Vec::new() } else { survivors }, blocks);
    ended
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
        let (mut token_ids, mut logprobs) = (vec![offer.token_ids[rank]], vec![offer.logprobs[rank]]);
        if let Some((top_ids, top_logprobs)) = offer.top {
            token_ids.extend_from_slice(top_ids);
            logprobs.extend_from_slice(top_logprobs);
        }
        table.push(&token_ids, &logprobs, rank as i32 + 1);
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
