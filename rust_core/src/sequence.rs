//! A request's state: what was asked ([`Request`]), what each sequence has said ([`History`]), and where its KV is
//! ([`Sequence`]). All that is true of a request lives in one [`Group`].

use std::borrow::Cow;
use std::sync::Arc;

use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::beam::BeamSearch;
use crate::block_manager::{BlockHash, BlockTable};
use crate::detokenizer::{Detokenizer, StopStrings, Vocabulary};
use crate::grammar::Grammar;
use crate::output::{FinishReason, LogprobTable, StopReason, Timing};
use crate::plan::{ROW_PARAMS, RowParam};
use crate::processor::Processor;
use crate::request::SamplingParams;
use crate::stop_regex::{RegexSearch, StopRegexes};

/// What was asked; nothing here changes while the request runs.
#[derive(Debug)]
pub struct Request {
    /// The caller's name, unique among live requests.
    pub request_id: Arc<str>,
    /// Order of arrival, unique for ever.
    pub arrival: u64,
    /// Lower runs first under the priority policy.
    pub priority: i64,
    /// Text of the prompt, if known.
    pub prompt_text: Option<Arc<str>>,
    /// Ids of the prompt; never empty.
    pub prompt: Arc<[u32]>,
    /// Validated parameters.
    pub params: SamplingParams,
    /// `params.stop`, ready to search for.
    pub stops: StopStrings,
    /// `params.stop_regex`, ready to search for.
    pub stop_regexes: Option<StopRegexes>,
    /// Ids that end a sequence, and whether the end has a reason to report.
    pub stop_tokens: Vec<(u32, bool)>,
    /// Generated tokens at which a sequence ends: `max_tokens` or the room left in the model's length.
    pub max_output: usize,
    /// Row of `row_params`, but for the noise keys.
    pub row_params: [i32; ROW_PARAMS],
    /// Bits of `plan::flags`.
    pub flags: i32,
    /// Seed of sequence 0; sequence i draws with `seed + i`.
    pub seed: u64,
    /// Distinct prompt tokens as (id, 0), if a repetition penalty counts them.
    pub prompt_counts: Vec<[i32; 2]>,
    /// Whether its rows may need one of the sections behind `copies` (but `prompt_rows`).
    pub has_extras: bool,
    /// Whether its rows depend on the tokens before them in a way that only the host can tell: a sequence then waits
    /// for its token in flight.
    pub waits_for_host: bool,
    /// See `RequestOptions::processor`; those that were asked for by name.
    pub processors: Vec<Processor>,
    /// Start of the hash chain.
    pub root_hash: BlockHash,
}

/// How many times each token was generated, in order of first appearance.
#[derive(Clone, Debug, Default)]
pub struct TokenCounts {
    /// (token id, count).
    pub entries: Vec<[i32; 2]>,
    index: HashMap<u32, u32>,
}

impl TokenCounts {
    fn add(&mut self, token: u32) {
        let next = self.entries.len() as u32;
        let index = *self.index.entry(token).or_insert(next);
        if index == next {
            self.entries.push([token as i32, 0]);
        }
        self.entries[index as usize][1] += 1;
    }
}

/// Why and by what a sequence ended.
pub type Finish = (FinishReason, Option<StopReason>);

/// What one sequence has said so far.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Generated tokens.
    pub output: Vec<u32>,
    /// Sum of their log-probabilities, if the request wants any.
    pub cumulative_logprob: f32,
    /// One row for each of them, if the request wants any.
    pub logprobs: Option<Box<LogprobTable>>,
    /// Text of the generated tokens; cut at a stop string.
    pub text: String,
    /// Set once ended.
    pub finish: Option<Finish>,
    /// Counts of generated tokens, if a penalty needs them.
    pub counts: Option<Box<TokenCounts>>,
    detokenizer: Option<Detokenizer>,
    /// Stop strings are looked for from this byte of the text on (behind `min_tokens`).
    stop_floor: usize,
    regex_search: RegexSearch,
    /// What the output must be, and how far it has come.
    pub grammar: Option<Box<Grammar>>,
    /// Why the grammar cannot be followed any further.
    pub grammar_error: Option<String>,
}

impl History {
    /// The empty history of a request.
    pub fn new(request: &Request, vocabulary: Option<&Vocabulary>) -> Self {
        let params = &request.params;
        let detokenizer = vocabulary
            .filter(|_| params.detokenize)
            .map(|vocabulary| Detokenizer::new(vocabulary, &request.prompt, params.skip_special_tokens));
        let width = 1 + request.row_params[RowParam::NumLogprobs as usize].max(0) as usize;
        Self {
            logprobs: params.logprobs.map(|_| LogprobTable::new(width).into()),
            counts: params.has_penalties().then(Box::default),
            detokenizer,
            ..Self::default()
        }
    }

    /// Append one token: its text, and whether it ends the sequence. A token that the grammar does not take is left out.
    pub fn accept(&mut self, token: u32, request: &Request, vocabulary: Option<&Vocabulary>) {
        let whole = self.follow_grammar(token);
        if self.grammar_error.is_some() {
            return;
        }
        self.output.push(token);
        if let Some(counts) = &mut self.counts {
            counts.add(token);
        }
        let min_tokens = request.params.min_tokens as usize;
        let stop = request.stop_tokens.iter().find(|(id, _)| *id == token && self.output.len() > min_tokens);
        let new_from = self.text.len();
        let visible = stop.is_none_or(|(_, reported)| *reported && request.params.include_stop_str_in_output);
        if visible && let (Some(detokenizer), Some(vocabulary)) = (&mut self.detokenizer, vocabulary) {
            detokenizer.push(vocabulary, token, &mut self.text);
        }
        if let Some((id, reported)) = stop {
            self.end(FinishReason::Stop, reported.then_some(StopReason::Token(*id)));
            return;
        }
        let stopped = self.ends_with_stop_text(new_from, request);
        if stopped {
            return;
        }
        if whole {
            self.end(FinishReason::Stop, None);
        } else if self.output.len() >= request.max_output {
            self.end(FinishReason::Length, None);
        }
    }

    /// Whether the grammar, if there is one, allows nothing more.
    fn follow_grammar(&mut self, token: u32) -> bool {
        match self.grammar.as_mut().map(|grammar| grammar.accept(token)) {
            None => false,
            Some(Ok(whole)) => whole,
            Some(Err(why)) => {
                self.grammar_error = Some(why);
                false
            }
        }
    }

    /// End because of an error.
    pub fn fail(&mut self) {
        self.end(FinishReason::Error, None);
    }

    fn end(&mut self, reason: FinishReason, stop: Option<StopReason>) {
        if let Some(detokenizer) = &mut self.detokenizer {
            detokenizer.finish(&mut self.text);
        }
        self.finish = Some((reason, stop));
    }

    fn ends_with_stop_text(&mut self, new_from: usize, request: &Request) -> bool {
        let regexes = request.stop_regexes.as_ref();
        if request.stops.is_empty() && regexes.is_none() {
            return false;
        }
        if self.output.len() <= request.params.min_tokens as usize {
            self.stop_floor = self.text.len();
            return false;
        }
        let floor = self.stop_floor;
        let string = request.stops.find(&self.text[floor..], new_from.max(floor) - floor);
        let string = string.map(|(stop, found)| (floor + found.start..floor + found.end, &request.params.stop[stop]));
        let regex = regexes.and_then(|regexes| regexes.find(&mut self.regex_search, &self.text, floor));
        let regex = regex.map(|(stop, found)| (found, &request.params.stop_regex[stop]));
        // What ends first; of two that end together, the string.
        let first = string.into_iter().chain(regex).min_by_key(|(found, _)| found.end);
        let Some((found, stop)) = first else { return false };
        let end = if request.params.include_stop_str_in_output { found.end } else { found.start };
        self.text.truncate(end);
        self.finish = Some((FinishReason::Stop, Some(StopReason::Text(stop.clone()))));
        true
    }

    /// Bytes of the text that can be shown: all at the end, before that all but the beginning of what may stop it.
    pub fn visible_text(&self, request: &Request) -> &str {
        if self.finish.is_some() {
            return &self.text;
        }
        let by_string =
            if request.stops.is_empty() { 0 } else { request.stops.held_back(&self.text[self.stop_floor..]) };
        &self.text[..self.text.len() - by_string.max(self.regex_search.held_back(self.text.len()))]
    }
}

/// One line of tokens with one block table.
#[derive(Debug, Default)]
pub struct Sequence {
    /// What it has said.
    pub history: History,
    /// Its place among the request's sequences (0 for beams).
    pub index: u32,
    /// Its blocks: on the device while the group runs, on the host while swapped, none while waiting.
    pub table: BlockTable,
    /// Tokens whose KV is written once every scheduled step has run.
    pub num_computed_tokens: usize,
    /// Sampled tokens that scheduled steps have yet to return.
    pub in_flight: u8,
    /// Row of the latest scheduled step that samples the token in flight.
    pub last_row: i32,
    /// Chain hashes of its full blocks, as far as computed.
    pub hashes: Vec<BlockHash>,
    /// Blocks that have been offered to the prefix cache, or come from there.
    pub num_published: usize,
    /// Bytes of text and tokens that delta outputs have delivered.
    pub delivered: (usize, usize),
}

impl Sequence {
    /// Whether it can still grow.
    pub fn is_live(&self) -> bool {
        self.history.finish.is_none()
    }

    /// Known tokens, given the prompt's length.
    pub fn num_tokens(&self, prompt_len: usize) -> usize {
        prompt_len + self.history.output.len()
    }

    /// Whether the tokens in flight already make up the longest allowed output.
    pub fn is_complete(&self, max_output: usize) -> bool {
        self.history.output.len() + self.in_flight as usize >= max_output
    }
}

/// A group's sequences; one alone lies inside the group, one cache miss nearer.
pub type Sequences = SmallVec<[Sequence; 1]>;

/// Where a group is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Owns no blocks: new, or to be recomputed.
    Waiting,
    /// Blocks on the device.
    Running,
    /// Blocks on the host.
    Swapped,
}

/// A request and its sequences; scheduled, swapped and freed together.
#[derive(Debug)]
pub struct Group {
    /// What was asked.
    pub request: Request,
    /// Where it is.
    pub state: State,
    /// Its sequences; ended ones stay until the group ends (beams: only the running ones).
    pub sequences: Sequences,
    /// Whether it waits for its grammar.
    pub compiling: bool,
    /// Whether the KV of what all sequences begin with has been handed on: while false, only the first live sequence
    /// computes, up to [`Group::shared_len`]. True from the start for requests of one sequence.
    pub forked: bool,
    /// Beam search state.
    pub beam: Option<BeamSearch>,
    /// Sequences it counts for in `max_num_seqs` while running.
    pub reserved: usize,
    /// Log-probabilities of the prompt, as they come.
    pub prompt_logprobs: Option<LogprobTable>,
    /// Prompt positions whose log-probabilities are scheduled.
    pub prompt_rows_scheduled: usize,
    /// See `Output::num_cached_tokens`.
    pub num_cached_tokens: usize,
    /// See `Output::num_preemptions`.
    pub num_preemptions: u32,
    /// See [`Timing`].
    pub timing: Timing,
    /// Whether the commit under way has news of it.
    pub touched: bool,
}

impl Group {
    /// Tokens of the prompt.
    pub fn prompt_len(&self) -> usize {
        self.request.prompt.len()
    }

    /// Tokens that all live sequences begin with, to be computed once: the prompt, and when they are recomputed, what
    /// they have said in common. Each keeps a token of its own to compute.
    pub fn shared_len(&self) -> usize {
        let mut outputs = self.live().map(|(_, sequence)| &sequence.history.output[..]);
        let Some(first) = outputs.next() else { return self.prompt_len() };
        let shared = outputs.fold(first.len().saturating_sub(1), |shared, output| {
            let equal = first[..shared].iter().zip(output).take_while(|(a, b)| a == b).count();
            equal.min(output.len().saturating_sub(1))
        });
        self.prompt_len() + shared
    }

    /// Live sequences with their places.
    pub fn live(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        self.sequences.iter().enumerate().filter(|(_, sequence)| sequence.is_live())
    }

    /// Sequences it may have while running.
    pub fn reservation(&self) -> usize {
        if self.forked && self.beam.is_none() { self.live().count() } else { self.request.params.width() }
    }

    /// Whether a scheduled step has yet to return a token.
    pub fn has_in_flight(&self) -> bool {
        self.sequences.iter().any(|sequence| sequence.in_flight > 0)
    }

    /// Tokens of a sequence's block number `index`, which is full.
    pub fn block_tokens<'a>(&'a self, sequence: &'a Sequence, index: usize, block_size: usize) -> Cow<'a, [u32]> {
        let (prompt, output) = (&self.request.prompt, &sequence.history.output);
        let (start, end) = (index * block_size, (index + 1) * block_size);
        if end <= prompt.len() {
            return Cow::Borrowed(&prompt[start..end]);
        }
        match start.checked_sub(prompt.len()) {
            Some(start) => Cow::Borrowed(&output[start..start + block_size]),
            None => Cow::Owned([&prompt[start..], &output[..end - prompt.len()]].concat()),
        }
    }
}
