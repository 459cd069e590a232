//! Grammars at work: compiled in threads of their own, then followed token by token by the sequences they constrain.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use llguidance::api::ParserLimits;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};

use crate::detokenizer::Vocabulary;
use crate::guided::StructuredOutputs;

/// Longest that a grammar may be compiled.
const MAX_COMPILE: Duration = Duration::from_secs(10);
/// Threads that compile at once; those given up do not count.
const MAX_THREADS: usize = 2;
/// The compiler calls itself for each part of a grammar: `MAX_BYTES` of `guided.rs` hold some 30,000 parts, which take
/// some 40 MB. Memory is used up only as it is touched.
const STACK_BYTES: usize = 256 << 20;
/// Compiled grammars that are kept for requests to come.
const MAX_KEPT: usize = 8;
/// What stands for an end of sequence that no vocabulary has.
const NO_TOKEN: u32 = u32::MAX;

/// A grammar and how far a text has come in it. A clone shares what the grammar has learnt of its lexer.
#[derive(Clone)]
pub struct Grammar {
    matcher: Matcher,
    /// Words of a mask.
    width: usize,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("Grammar")
    }
}

impl Grammar {
    /// Take in a token. True if nothing can follow. Fails for a token that the mask does not have.
    pub fn accept(&mut self, token: u32) -> Result<bool, String> {
        self.matcher.consume_token(token).map_err(one_line)?;
        Ok(self.matcher.is_stopped())
    }

    /// Append a bit for each token, 32 a word: 1 if it may come next. Ends of sequence may where the text may end.
    /// Fails if that is too much work; nothing is appended then.
    pub fn write_mask(&mut self, words: &mut Vec<i32>) -> Result<(), String> {
        let mask = self.matcher.compute_mask_or_eos().map_err(one_line)?;
        words.extend(mask.as_slice()[..self.width].iter().map(|&word| word as i32));
        Ok(())
    }
}

/// An error in one line, not too long.
fn one_line(error: impl fmt::Display) -> String {
    let text = error.to_string();
    if text.contains("NoExtensionBias") {
        return "no text fits it".to_owned();
    }
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").chars().take(300).collect()
}

/// What a vocabulary is for grammars.
fn tok_env(vocabulary: &Vocabulary, vocab_size: usize, eos_token_ids: &[u32]) -> TokEnv {
    let text = |id: u32| if vocabulary.is_special(id) { Vec::new() } else { vocabulary.bytes(id).to_vec() };
    let words: Vec<Vec<u8>> = (0..vocab_size as u32).map(text).collect();
    let first = eos_token_ids.first().copied().unwrap_or(NO_TOKEN);
    let trie = TokTrie::from(&TokRxInfo::new(vocab_size as u32, first), &words);
    let trie = if eos_token_ids.is_empty() { trie } else { trie.with_eos_tokens(eos_token_ids) };
    Arc::new(ApproximateTokEnv::new(trie))
}

fn limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 25_000,
        max_grammar_size: 200_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Whose grammar it is: slot and arrival of a request.
pub(crate) type Owner = (u32, u64);
/// A compiled grammar, or why there is none.
pub(crate) type Compiled = std::result::Result<Grammar, String>;

/// What all compiling threads share.
struct Shared {
    vocabulary: Arc<Vocabulary>,
    vocab_size: usize,
    eos_token_ids: Vec<u32>,
    /// Made by the first thread that needs it: it takes a second for a large vocabulary.
    factory: OnceLock<ParserFactory>,
    /// Oldest first.
    kept: Mutex<VecDeque<(StructuredOutputs, Grammar)>>,
}

impl Shared {
    fn factory(&self) -> Result<&ParserFactory, String> {
        if let Some(factory) = self.factory.get() {
            return Ok(factory);
        }
        let env = tok_env(&self.vocabulary, self.vocab_size, &self.eos_token_ids);
        let mut factory = ParserFactory::new_simple(&env).map_err(one_line)?;
        *factory.quiet().limits_mut() = limits();
        Ok(self.factory.get_or_init(|| factory))
    }

    fn compile(&self, wanted: &StructuredOutputs) -> Compiled {
        if let Some(known) = self.known(wanted) {
            return Ok(known);
        }
        let factory = self.factory()?;
        let grammar = wanted.grammar().map_err(|error| error.to_string())?;
        let matcher = catch_unwind(AssertUnwindSafe(|| Matcher::new(factory.create_parser(grammar))))
            .map_err(|_| "it cannot be compiled".to_owned())?;
        if let Some(error) = matcher.get_error() {
            return Err(one_line(error));
        }
        let mut grammar = Grammar { matcher, width: self.vocab_size.div_ceil(32) };
        grammar.write_mask(&mut Vec::new())?;
        if let Ok(mut kept) = self.kept.lock() {
            kept.push_back((wanted.clone(), grammar.clone()));
            if kept.len() > MAX_KEPT {
                kept.pop_front();
            }
        }
        Ok(grammar)
    }

    fn known(&self, wanted: &StructuredOutputs) -> Option<Grammar> {
        let mut kept = self.kept.lock().ok()?;
        let at = kept.iter().position(|(known, _)| known == wanted)?;
        let entry = kept.remove(at)?;
        let grammar = entry.1.clone();
        kept.push_back(entry);
        Some(grammar)
    }
}

struct Job {
    owner: Owner,
    wanted: StructuredOutputs,
    begun: Option<Instant>,
}

/// Compiles the grammars of requests off the step loop.
pub(crate) struct Compiler {
    shared: Arc<Shared>,
    jobs: VecDeque<Job>,
    sender: Sender<(Owner, Compiled)>,
    /// Locked by nobody else: a receiver alone cannot be in what several threads see.
    receiver: Mutex<Receiver<(Owner, Compiled)>>,
}

impl fmt::Debug for Compiler {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.debug_struct("Compiler").field("jobs", &self.jobs.len()).finish_non_exhaustive()
    }
}

impl Compiler {
    pub fn new(vocabulary: Arc<Vocabulary>, vocab_size: usize, eos_token_ids: Vec<u32>) -> Self {
        let (sender, receiver) = channel();
        let (factory, kept) = (OnceLock::new(), Mutex::default());
        let shared = Arc::new(Shared { vocabulary, vocab_size, eos_token_ids, factory, kept });
        Self { shared, jobs: VecDeque::new(), sender, receiver: Mutex::new(receiver) }
    }

    /// Whether a grammar is on its way.
    pub fn is_busy(&self) -> bool {
        !self.jobs.is_empty()
    }

    pub fn submit(&mut self, owner: Owner, wanted: StructuredOutputs) {
        self.jobs.push_back(Job { owner, wanted, begun: None });
        self.start();
    }

    /// Grammars that are ready, and those that are not going to be.
    pub fn take(&mut self) -> Vec<(Owner, Compiled)> {
        if self.jobs.is_empty() {
            return Vec::new();
        }
        let mut done: Vec<(Owner, Compiled)> =
            self.receiver.get_mut().map(|receiver| receiver.try_iter().collect()).unwrap_or_default();
        let late = |job: &Job| job.begun.is_some_and(|begun| begun.elapsed() > MAX_COMPILE);
        let given_up = self.jobs.iter().filter(|job| late(job));
        done.extend(given_up.map(|job| (job.owner, Err(format!("it takes more than {} s", MAX_COMPILE.as_secs())))));
        // What comes of one that was given up has no job any more.
        done.retain(|(owner, _)| {
            let at = self.jobs.iter().position(|job| job.owner == *owner);
            at.and_then(|at| self.jobs.remove(at)).is_some()
        });
        self.start();
        done
    }

    /// Begin jobs as far as there are threads for them.
    fn start(&mut self) {
        let running = self.jobs.iter().filter(|job| job.begun.is_some()).count();
        let waiting = self.jobs.iter_mut().filter(|job| job.begun.is_none());
        for job in waiting.take(MAX_THREADS.saturating_sub(running)) {
            job.begun = Some(Instant::now());
            let (shared, sender) = (Arc::clone(&self.shared), self.sender.clone());
            let (owner, wanted) = (job.owner, job.wanted.clone());
            let failed = self.sender.clone();
            let compile = move || {
                let compiled = shared.compile(&wanted);
                // Nobody listens once the scheduler is gone.
                drop(sender.send((owner, compiled)));
            };
            let spawned = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(compile);
            if let Err(error) = spawned {
                drop(failed.send((owner, Err(format!("no thread can compile it: {error}")))));
            }
        }
    }
}
