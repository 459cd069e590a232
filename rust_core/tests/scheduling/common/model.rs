//! The fake model: what comes next is a hash of the whole history, the row's noise and its penalties.
//!
//! Also its solo runs, written down without any scheduler: what each request must say under every schedule.

use pyvllm_core::detokenizer::Vocabulary;
use pyvllm_core::output::{FinishReason, StopReason};
use pyvllm_core::request::SamplingParams;

/// Logits of the fake model; allowed and banned sets are masks of 64 bits.
pub const VOCAB: u32 = 20;
const ALL: u64 = (1 << VOCAB) - 1;

/// Hash of a token, its position and everything before it.
pub type Digest = u64;
/// The digest before the first token.
pub const EMPTY: Digest = 0x1234_5678_9abc_def0;

/// splitmix64's finalizer.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The digest after one more token.
pub fn extend(before: Digest, token: u32, position: usize) -> Digest {
    mix(before.rotate_left(7) ^ (u64::from(token) << 32 | position as u64)).max(1)
}

/// The digest of a whole history.
pub fn digest(tokens: &[u32]) -> Digest {
    tokens.iter().enumerate().fold(EMPTY, |before, (position, &token)| extend(before, token, position))
}

/// All that a row's logits depend on.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub digest: Digest,
    /// The noise key of a random row, 0 of a greedy one.
    pub noise: u64,
    /// Sums of [`penalty`] and [`bias`], so that their order does not matter.
    pub adjusted: u64,
    pub allowed: u64,
    pub banned: u64,
}

impl Row {
    pub fn new(digest: Digest) -> Self {
        Self { digest, noise: 0, adjusted: 0, allowed: ALL, banned: 0 }
    }

    fn may(&self, token: u32) -> bool {
        self.allowed & !self.banned & (1 << token) != 0
    }

    /// Log-probability of a token; ends of sequence are likelier than others.
    pub fn logprob(&self, token: u32) -> f32 {
        if !self.may(token) {
            return f32::NEG_INFINITY;
        }
        let hash = mix(mix(self.digest ^ self.noise.rotate_left(17)) ^ self.adjusted ^ (u64::from(token) << 56));
        let scale = if token < 2 { 2.0 } else { 4.0 };
        -((hash >> 40) as f32 / 16_777_216.0) * scale
    }

    /// The `count` best tokens, best first; rows with fewer possible ones are filled with -inf.
    pub fn best(&self, count: usize) -> Vec<(u32, f32)> {
        let mut all: Vec<(u32, f32)> = (0..VOCAB).map(|token| (token, self.logprob(token))).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all.truncate(count);
        all
    }

    /// The best token.
    pub fn sample(&self) -> (u32, f32) {
        let mut best = (0, f32::NEG_INFINITY);
        for token in 0..VOCAB {
            let logprob = self.logprob(token);
            if logprob > best.1 {
                best = (token, logprob);
            }
        }
        best
    }
}

/// The effect of one token's count on a row.
pub fn penalty(token: u32, count: i32) -> u64 {
    mix(u64::from(token) << 32 | (count + 1) as u64)
}

/// The effect of one bias on a row.
pub fn bias(token: u32, bits: i32) -> u64 {
    mix(u64::from(token) << 32 | u64::from(bits as u32)).wrapping_mul(3)
}

/// The noise key of the draw at an output position, as the plan's documentation defines it.
pub fn noise(seed: u64, position: usize) -> u64 {
    let golden = 0x9e37_79b9_7f4a_7c15_u64;
    mix(mix(seed.wrapping_add(golden)).wrapping_add((position as u64 + 1).wrapping_mul(golden)))
}

/// What a token adds to the text: ids 0 and 1 are special, the others are letters.
pub fn letter(token: u32) -> Option<char> {
    (token >= 2).then(|| char::from(b'a' + token as u8))
}

/// The letters as a vocabulary.
pub fn vocabulary() -> Vocabulary {
    let tokens = (0..VOCAB).map(|id| letter(id).map_or("<special>".to_owned(), String::from));
    Vocabulary::new(tokens, &[0, 1], &[], false)
}

/// What one sequence must say.
#[derive(Clone, Debug)]
pub struct Expected {
    pub tokens: Vec<u32>,
    pub cumulative: f32,
    pub reason: FinishReason,
    pub stop: Option<StopReason>,
    pub text: String,
    /// The digest of prompt and output but the last token: what must be in memory for the last draw.
    pub rows: Vec<Row>,
}

/// A request as the oracle sees it.
#[derive(Clone, Debug)]
pub struct Asked {
    pub prompt: Vec<u32>,
    pub params: SamplingParams,
    pub salt: Option<String>,
    pub priority: i64,
    pub eos: Vec<u32>,
    pub max_model_len: usize,
    pub has_text: bool,
}

impl Asked {
    pub fn max_output(&self) -> usize {
        let room = self.max_model_len - self.prompt.len();
        self.params.max_tokens.map_or(room, |max| room.min(max as usize))
    }

    /// Ids that end a sequence, with what the end has to report.
    pub fn stop_ids(&self) -> Vec<(u32, Option<StopReason>)> {
        let mut ids: Vec<(u32, Option<StopReason>)> = Vec::new();
        let eos = if self.params.ignore_eos { &[][..] } else { &self.eos[..] };
        for (i, &id) in eos.iter().enumerate() {
            ids.push((id, (i > 0).then_some(StopReason::Token(id))));
        }
        for &id in &self.params.stop_token_ids {
            if ids.iter().all(|(known, _)| *known != id as u32) {
                ids.push((id as u32, Some(StopReason::Token(id as u32))));
            }
        }
        ids
    }

    fn has_penalties(&self) -> bool {
        let params = &self.params;
        params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0
    }

    /// The row that draws the token after `output`.
    pub fn row(&self, before: Digest, output: &[u32], child: u64) -> Row {
        let params = &self.params;
        let mut row = Row::new(before);
        if params.temperature > 0.0 {
            row.noise = noise((params.seed.unwrap() as u64).wrapping_add(child), output.len());
        }
        if self.has_penalties() {
            let in_prompt = |id| params.repetition_penalty != 1.0 && self.prompt.contains(&id);
            for id in 0..VOCAB {
                let count = output.iter().filter(|&&token| token == id).count() as i32;
                if count > 0 || in_prompt(id) {
                    row.adjusted = row.adjusted.wrapping_add(penalty(id, count));
                }
            }
        }
        for &(id, value) in &params.logit_bias {
            row.adjusted = row.adjusted.wrapping_add(bias(id as u32, (value as f32).to_bits() as i32));
        }
        if let Some(allowed) = &params.allowed_token_ids {
            row.allowed = allowed.iter().fold(0, |mask, &id| mask | 1 << id);
        }
        if output.len() < params.min_tokens as usize {
            row.banned = self.stop_ids().iter().fold(0, |mask, (id, _)| mask | 1 << id);
        }
        for (last, before) in params.bad_word_ids.iter().filter_map(|word| word.split_last()) {
            if output.ends_with(before) {
                row.banned |= 1 << last;
            }
        }
        row
    }

    /// The solo run of one sequence.
    pub fn solo(&self, child: u64) -> Expected {
        let stop_ids = self.stop_ids();
        let mut before = digest(&self.prompt);
        let (mut tokens, mut rows, mut cumulative) = (Vec::new(), Vec::new(), 0.0);
        let (mut text, mut floor) = (String::new(), 0);
        loop {
            let row = self.row(before, &tokens, child);
            let (token, logprob) = row.sample();
            before = extend(before, token, self.prompt.len() + tokens.len());
            tokens.push(token);
            rows.push(row);
            cumulative += logprob;
            let early = tokens.len() <= self.params.min_tokens as usize;
            let stop = stop_ids.iter().find(|(id, _)| *id == token && !early);
            let shown = stop.is_none_or(|(_, report)| report.is_some() && self.params.include_stop_str_in_output);
            text.extend(letter(token).filter(|_| shown && self.has_text));
            if let Some((_, report)) = stop {
                let stop = report.clone();
                return Expected { tokens, cumulative, reason: FinishReason::Stop, stop, text, rows };
            }
            if early {
                floor = text.len();
            } else if let Some((at, stop)) = find_stop(&text[floor..], &self.params.stop) {
                let kept = if self.params.include_stop_str_in_output { stop.len() } else { 0 };
                text.truncate(floor + at + kept);
                let stop = Some(StopReason::Text(stop.clone()));
                return Expected { tokens, cumulative, reason: FinishReason::Stop, stop, text, rows };
            }
            if tokens.len() >= self.max_output() {
                return Expected { tokens, cumulative, reason: FinishReason::Length, stop: None, text, rows };
            }
        }
    }
}

/// The stop string that begins first; the first of the list if two do.
fn find_stop<'a>(text: &str, stops: &'a [String]) -> Option<(usize, &'a String)> {
    let found = stops.iter().filter_map(|stop| Some((text.find(stop.as_str())?, stop)));
    found.reduce(|best, other| if other.0 < best.0 { other } else { best })
}
