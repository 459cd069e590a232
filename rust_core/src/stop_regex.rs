//! Regular expressions that end a text, followed byte by byte, so that what is found does not depend on how tokens cut
//! the text and no byte is read twice.
//!
//! Of all matches the one that ends first counts, of those that end together the longest. Time for each byte, and
//! memory, are limited by the size of the compiled expressions, whatever they are.

use std::ops::Range;

use regex_automata::nfa::thompson::{BuildError, Compiler, Config, NFA, State, WhichCaptures};
use regex_automata::util::look::Look;
use regex_automata::util::primitives::StateID;

use crate::error::{Error, Result};

/// Most bytes of one expression.
const MAX_PATTERN: usize = 4096;
/// Most bytes that the compiled expressions of a request may take.
const MAX_COMPILED: usize = 1 << 18;
/// Most bytes of a match: as much text may be held back.
pub const MAX_MATCH: usize = 1024;
/// What can be told without the text that follows.
const LOOKS_BEHIND: [Look; 4] = [Look::Start, Look::StartLF, Look::WordStartHalfAscii, Look::WordStartHalfUnicode];

/// The compiled expressions of one request.
#[derive(Debug)]
pub struct StopRegexes {
    nfa: NFA,
}

/// How far a text has been searched, and the matches that may still come.
#[derive(Clone, Debug, Default)]
pub struct RegexSearch {
    /// Bytes of the text that have been read.
    scanned: usize,
    /// States that wait for the next byte, and where their match begins; oldest first, each state once.
    threads: Vec<(StateID, usize)>,
}

impl RegexSearch {
    /// Bytes at the end of a text, of `len` bytes and searched to its end, that a match may begin with.
    pub fn held_back(&self, len: usize) -> usize {
        self.threads.first().map_or(0, |&(_, start)| len - start)
    }
}

impl StopRegexes {
    /// Compile expressions. Fails for one that is no expression, is too large, looks ahead or matches nothing at all.
    pub fn new(patterns: &[String]) -> Result<Self> {
        let wrong = |expected: &str| Error::range("stop_regex", expected, format_args!("{patterns:?}"));
        if let Some(long) = patterns.iter().find(|pattern| pattern.len() > MAX_PATTERN) {
            return Err(Error::range("stop_regex", &format!("at most {MAX_PATTERN} bytes long"), long.len()));
        }
        let config = Config::new().which_captures(WhichCaptures::None).nfa_size_limit(Some(MAX_COMPILED));
        let nfa = Compiler::new().configure(config).build_many(patterns).map_err(|error| match error.size_limit() {
            Some(limit) => wrong(&format!("at most {limit} bytes large once compiled")),
            None => wrong(&format!("a regular expression ({})", cause_of(&error))),
        })?;
        if nfa.look_set_any().iter().any(|look| !LOOKS_BEHIND.contains(&look)) {
            return Err(wrong("without looks at the text that follows ($, \\b, \\B; \\b{start-half} is possible)"));
        }
        let regexes = Self { nfa };
        if regexes.begin(&[], 0, &mut Visited::new(&regexes.nfa), &mut Vec::new()).is_some() {
            return Err(wrong("an expression that does not match the empty string"));
        }
        Ok(regexes)
    }

    /// Search what is new of a text: index of the expression and byte range of the match that ends first. Matches
    /// begin at `floor` or behind it.
    pub fn find(&self, search: &mut RegexSearch, text: &str, floor: usize) -> Option<(usize, Range<usize>)> {
        let bytes = text.as_bytes();
        let mut visited = Visited::new(&self.nfa);
        for &(state, _) in &search.threads {
            visited.insert(state);
        }
        let mut next = Vec::new();
        for at in search.scanned.max(floor)..bytes.len() {
            self.begin(bytes, at, &mut visited, &mut search.threads);
            visited.clear();
            for &(state, start) in &search.threads {
                let Some(target) = self.step(state, bytes[at]).filter(|_| at + 1 - start <= MAX_MATCH) else {
                    continue;
                };
                if let Some(pattern) = self.close(target, start, bytes, at + 1, &mut visited, &mut next) {
                    return Some((pattern, start..at + 1));
                }
            }
            search.threads.clear();
            std::mem::swap(&mut search.threads, &mut next);
        }
        search.scanned = bytes.len();
        None
    }

    /// Add the states of a match that begins at `at`, where `visited` has those that older matches are in.
    fn begin(
        &self,
        text: &[u8],
        at: usize,
        visited: &mut Visited,
        threads: &mut Vec<(StateID, usize)>,
    ) -> Option<usize> {
        self.close(self.nfa.start_anchored(), at, text, at, visited, threads)
    }

    /// Where a state goes with a byte.
    fn step(&self, state: StateID, byte: u8) -> Option<StateID> {
        match self.nfa.state(state) {
            State::ByteRange { trans } => trans.matches_byte(byte).then_some(trans.next),
            State::Sparse(sparse) => sparse.matches_byte(byte),
            State::Dense(dense) => dense.matches_byte(byte),
            _ => None,
        }
    }

    /// Add the states that wait for the byte at `at` and are reached from `state` without one; the expression that
    /// matches there, if one does.
    fn close(
        &self,
        state: StateID,
        start: usize,
        text: &[u8],
        at: usize,
        visited: &mut Visited,
        threads: &mut Vec<(StateID, usize)>,
    ) -> Option<usize> {
        let mut matched = None;
        let mut stack = vec![state];
        while let Some(state) = stack.pop() {
            if !visited.insert(state) {
                continue;
            }
            match self.nfa.state(state) {
                State::ByteRange { .. } | State::Sparse(_) | State::Dense(_) => threads.push((state, start)),
                State::Union { alternates } => stack.extend(alternates.iter().rev()),
                State::BinaryUnion { alt1, alt2 } => stack.extend([*alt2, *alt1]),
                State::Capture { next, .. } => stack.push(*next),
                State::Look { look, next } => {
                    if self.nfa.look_matcher().matches(*look, text, at) {
                        stack.push(*next);
                    }
                }
                State::Match { pattern_id } => {
                    let pattern = pattern_id.as_usize();
                    matched = Some(matched.map_or(pattern, |first: usize| first.min(pattern)));
                }
                State::Fail => {}
            }
        }
        matched
    }
}

/// Why an expression is none, in one line: parsers draw the place of the fault above it.
fn cause_of(error: &BuildError) -> String {
    let cause = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    cause.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

/// The states reached at one place of a text.
struct Visited(Vec<bool>);

impl Visited {
    fn new(nfa: &NFA) -> Self {
        Self(vec![false; nfa.states().len()])
    }

    /// False if it was there.
    fn insert(&mut self, state: StateID) -> bool {
        !std::mem::replace(&mut self.0[state.as_usize()], true)
    }

    fn clear(&mut self) {
        self.0.fill(false);
    }
}
