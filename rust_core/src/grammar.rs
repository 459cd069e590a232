//! Grammars at work: compiled in threads of their own, then followed token by token by the sequences they constrain.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use llguidance::api::ParserLimits;
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use rayon::prelude::*;

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
/// With fewer masks in a step, handing them to several threads takes longer than making them.
const MIN_PARALLEL: usize = 8;
/// What stands for an end of sequence that no vocabulary has.
const NO_TOKEN: u32 = u32::MAX;

/// A grammar and how far a text has come in it. Clones share what they learn of its lexer, up to a limit.
#[derive(Clone)]
pub struct Grammar {
    matcher: Matcher,
    /// What it was before any token; never used itself, so it has learnt nothing.
    unused: Arc<Mutex<Matcher>>,
    /// Those taken in.
    tokens: Vec<u32>,
    /// Words of a mask.
    width: usize,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("Grammar")
    }
}

impl Grammar {
    fn new(matcher: Matcher, width: usize) -> Self {
        Self { unused: Arc::new(Mutex::new(matcher.deep_clone())), matcher, tokens: Vec::new(), width }
    }

    /// Do something; if that fails, once more with a lexer of its own: the limit may have been reached by what others
    /// wrote.
    fn attempt<T>(&mut self, act: impl Fn(&mut Matcher) -> Result<T, String>) -> Result<T, String> {
        act(&mut self.matcher).or_else(|why| {
            self.matcher = self.unused.lock().map_err(|_| why)?.deep_clone();
            self.matcher.consume_tokens(&self.tokens).map_err(one_line)?;
            act(&mut self.matcher)
        })
    }

    fn mask(&mut self) -> Result<SimpleVob, String> {
        self.attempt(|matcher| matcher.compute_mask_or_eos().map_err(one_line))
    }

    /// Take in a token. True if nothing can follow. Fails for a token that the mask does not have.
    pub fn accept(&mut self, token: u32) -> Result<bool, String> {
        self.attempt(|matcher| matcher.consume_token(token).map_err(one_line)).map_err(|error| {
            // The mask held it back, so nothing else was left.
            if error.contains("doesn't satisfy the grammar") {
                "allowed_token_ids, bad_words or logits_processors leave none of the tokens that it lets follow"
                    .to_owned()
            } else {
                error
            }
        })?;
        self.tokens.push(token);
        Ok(self.matcher.is_stopped())
    }

    /// Write a bit for each token, 32 a word: 1 if it may come next. Ends of sequence may where the text may end.
    /// Fails if that is too much work; nothing is written then.
    fn write_mask(&mut self, words: &mut [i32]) -> Result<(), String> {
        let mask = self.mask()?;
        for (word, &bits) in words.iter_mut().zip(mask.as_slice()) {
            *word = bits as i32;
        }
        Ok(())
    }
}

/// A mask to be written, and its place among those of a step.
struct Mask<'a> {
    place: usize,
    grammar: &'a mut Grammar,
    words: &'a mut [i32],
}

impl Mask<'_> {
    /// What all clones of one grammar have in common.
    fn origin(&self) -> *const Mutex<Matcher> {
        Arc::as_ptr(&self.grammar.unused)
    }

    fn is_like(&self, other: &Self) -> bool {
        self.origin() == other.origin()
    }

    /// Its place and why, if it cannot be written.
    fn write(&mut self) -> Option<(usize, String)> {
        self.grammar.write_mask(self.words).err().map(|why| (self.place, why))
    }
}

/// Append the masks of grammars of one vocabulary; why those failed, by index, whose masks allow everything.
///
/// Clones of one grammar wait for one another, so only different ones are worth several threads.
#[allow(clippy::vec_box)] // they come from and go back to their sequences in their boxes
pub(crate) fn write_masks(grammars: &mut [Box<Grammar>], words: &mut Vec<i32>) -> Vec<(usize, String)> {
    let Some(width) = grammars.first().map(|grammar| grammar.width) else { return Vec::new() };
    let start = words.len();
    words.resize(start + grammars.len() * width, -1);
    let each = grammars.iter_mut().zip(words[start..].chunks_mut(width)).enumerate();
    let mut masks: Vec<Mask> = each.map(|(place, (grammar, words))| Mask { place, grammar, words }).collect();
    masks.sort_by_key(Mask::origin);
    if masks.len() < MIN_PARALLEL || masks[0].is_like(&masks[masks.len() - 1]) {
        return masks.iter_mut().filter_map(Mask::write).collect();
    }
    let forms: Vec<_> = masks.chunk_by_mut(Mask::is_like).collect();
    forms.into_par_iter().flat_map_iter(|own| own.iter_mut().filter_map(Mask::write)).collect()
}

/// An error in one line, not too long.
fn one_line(error: impl fmt::Display) -> String {
    const MOST: usize = 300;
    let text = error.to_string();
    let text = text.split("<backtrace>").next().unwrap_or_default();
    if text.contains("NoExtensionBias") {
        return "no text fits it".to_owned();
    }
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let line = words(text);
    // The cause of what is wrong with an expression comes after the expression, which may be long.
    let line = text.rsplit_once("error: ").filter(|_| line.len() > MOST).map_or(line, |(_, cause)| words(cause));
    line.chars().take(MOST).collect()
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
        // An object may have some 1,200 properties.
        max_items_in_row: 5_000,
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
    /// Made by the first thread that needs it, from the whole vocabulary.
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
        let mut grammar = Grammar::new(matcher, self.vocab_size.div_ceil(32));
        grammar.mask()?;
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
        let (wanted, mut grammar) = kept.remove(at)?;
        // If its lexer has come to the limit, it gets another one here, for all requests to come.
        grammar.mask().ok()?;
        kept.push_back((wanted, grammar.clone()));
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
    /// Those that need no compilation, since the grammar is kept.
    known: Vec<(Owner, Compiled)>,
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
        Self { shared, jobs: VecDeque::new(), known: Vec::new(), sender, receiver: Mutex::new(receiver) }
    }

    /// Whether a grammar is on its way.
    pub fn is_busy(&self) -> bool {
        !self.jobs.is_empty() || !self.known.is_empty()
    }

    pub fn submit(&mut self, owner: Owner, wanted: StructuredOutputs) {
        if let Some(grammar) = self.shared.known(&wanted) {
            self.known.push((owner, Ok(grammar)));
            return;
        }
        self.jobs.push_back(Job { owner, wanted, begun: None });
        self.start();
    }

    /// Grammars that are ready, and those that are not going to be.
    pub fn take(&mut self) -> Vec<(Owner, Compiled)> {
        let mut known = std::mem::take(&mut self.known);
        if self.jobs.is_empty() {
            return known;
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
        if done.iter().any(|(_, compiled)| compiled.is_ok()) {
            self.serve_waiting(&mut done);
        }
        self.start();
        known.append(&mut done);
        known
    }

    /// Jobs that have not begun may want what has just been compiled.
    fn serve_waiting(&mut self, done: &mut Vec<(Owner, Compiled)>) {
        self.jobs.retain(|job| {
            let known = if job.begun.is_none() { self.shared.known(&job.wanted) } else { None };
            let waits = known.is_none();
            done.extend(known.map(|grammar| (job.owner, Ok(grammar))));
            waits
        });
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
