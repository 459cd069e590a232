//! Beam search as transformers' `_beam_search` does it (arrays of `num_beams`, scores of -1e9 for what is not there),
//! for one prompt, over the fake model. Written after it line by line, to hold the scheduler's against it.

use pyvllm_core::request::EarlyStopping;

use super::model::{Asked, Digest, VOCAB, digest, extend};

const ABSENT: f32 = -1.0e9;

#[derive(Clone, Debug)]
struct Beam {
    tokens: Vec<u32>,
    digest: Digest,
    score: f32,
}

/// One returned sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    pub tokens: Vec<u32>,
    /// Score by which it was ranked.
    pub score: f32,
    /// Sum of its log-probabilities.
    pub cumulative: f32,
}

struct Finished {
    found: Found,
    sent: bool,
}

fn normalizer(length: usize, penalty: f64) -> f32 {
    (length as f64).powf(penalty) as f32
}

/// `num_return_sequences` = n best sequences of a beam search of the request's width.
pub fn search(asked: &Asked) -> Vec<Found> {
    let params = &asked.params;
    let num_beams = params.best_of.unwrap_or(params.n) as usize;
    let stop_ids: Vec<u32> = asked.stop_ids().into_iter().map(|(id, _)| id).collect();
    let beams_to_keep = 2.max(1 + stop_ids.len()) * num_beams;
    let max_new = asked.max_output();
    let always = params.early_stopping == EarlyStopping::Always;

    let start = Beam { tokens: Vec::new(), digest: digest(&asked.prompt), score: 0.0 };
    let mut running = vec![Beam { score: ABSENT, ..start.clone() }; num_beams];
    running[0] = start;
    let nothing = || Found { tokens: Vec::new(), score: ABSENT, cumulative: ABSENT };
    let mut finished: Vec<Finished> = (0..num_beams).map(|_| Finished { found: nothing(), sent: false }).collect();
    let mut improvable = true;
    let mut length = 0;
    loop {
        let candidates = continuations(asked, &running, length, beams_to_keep);
        let early = length < params.min_tokens as usize;
        let hits = |beam: &Beam| {
            let last = beam.tokens[length];
            (stop_ids.contains(&last) && !early) || length + 1 >= max_new
        };
        let stops: Vec<bool> = candidates.iter().map(hits).collect();

        let mut order: Vec<(f32, usize)> =
            candidates.iter().zip(&stops).enumerate().map(|(i, (beam, &stop))| (beam.score + off(stop), i)).collect();
        order.sort_by(|a, b| b.0.total_cmp(&a.0));
        running = order[..num_beams].iter().map(|&(score, i)| Beam { score, ..candidates[i].clone() }).collect();

        let full = finished.iter().all(|slot| slot.sent) && always;
        for (i, (beam, &stop)) in candidates.iter().zip(&stops).enumerate() {
            let sent = stop && i < num_beams;
            let mut score = beam.score / normalizer(length + 1, params.length_penalty);
            score += off(full);
            score += off(!improvable);
            score += off(!sent);
            let found = Found { tokens: beam.tokens.clone(), score, cumulative: beam.score };
            finished.push(Finished { found, sent });
        }
        finished.sort_by(|a, b| b.found.score.total_cmp(&a.found.score));
        finished.truncate(num_beams);

        length += 1;
        let never = params.early_stopping == EarlyStopping::Never && params.length_penalty > 0.0;
        let hypothetical = if never { max_new } else { length };
        let best = running[0].score / normalizer(hypothetical, params.length_penalty);
        let worst = finished.iter().map(|slot| slot.found.score).fold(f32::INFINITY, f32::min);
        improvable &= finished.iter().any(|slot| best > if slot.sent { worst } else { ABSENT });
        let open = !(finished.iter().all(|slot| slot.sent) && always);
        if !(improvable && open && !stops.iter().all(|&stop| stop)) {
            return finished.into_iter().take(params.n as usize).map(|slot| slot.found).collect();
        }
    }
}

fn off(yes: bool) -> f32 {
    if yes { ABSENT } else { 0.0 }
}

fn continuations(asked: &Asked, running: &[Beam], length: usize, beams_to_keep: usize) -> Vec<Beam> {
    let mut all: Vec<(f32, usize, u32)> = Vec::new();
    for (parent, beam) in running.iter().enumerate() {
        let row = asked.row(beam.digest, &beam.tokens, 0);
        let best = row.best(VOCAB as usize).into_iter();
        all.extend(best.map(|(token, logprob)| (logprob + beam.score, parent, token)));
    }
    all.sort_by(|a, b| b.0.total_cmp(&a.0));
    let grow = |&(score, parent, token): &(f32, usize, u32)| {
        let Beam { tokens, digest, .. } = &running[parent];
        let tokens = tokens.iter().copied().chain([token]).collect();
        Beam { tokens, digest: extend(*digest, token, asked.prompt.len() + length), score }
    };
    all.iter().take(beams_to_keep).map(grow).collect()
}
