//! The prefix cache: cases from the field.

use pyvllm_core::Scheduler;
use pyvllm_core::plan::{Header, Section};
use pyvllm_core::request::SamplingParams;
use pyvllm_core::scheduler::RequestOptions;

use crate::common::{Engine, config, greedy, prompt, solo};

#[test]
fn b007_a_hit_and_a_miss_in_one_batch() {
    let mut engine = Engine::new(config(32, 4));
    let shared = prompt(1, 8);
    engine.add("warm", shared.clone(), greedy(2));
    engine.drain(5);
    let hit = [shared, vec![9]].concat();
    engine.add("hit", hit.clone(), greedy(6));
    engine.add("miss", prompt(2, 9), greedy(6));
    engine.drain(10);
    assert_eq!(engine.output("hit").num_cached_tokens, 8);
    assert_eq!(engine.output("miss").num_cached_tokens, 0);
    assert_eq!(engine.tokens("hit"), solo(&hit, &greedy(6)));
    assert_eq!(engine.tokens("miss"), solo(&prompt(2, 9), &greedy(6)));
}

#[test]
fn b011_a_full_hit_leaves_a_token_to_compute() {
    let mut engine = Engine::new(config(16, 4));
    engine.add("first", prompt(1, 8), greedy(4));
    engine.drain(10);
    engine.add("second", prompt(1, 8), greedy(4));
    let plan = engine.step().unwrap();
    assert_eq!(plan.header(Header::NumTokens), 4);
    engine.drain(10);
    assert_eq!(engine.output("first").num_cached_tokens, 0);
    assert_eq!(engine.output("second").num_cached_tokens, 4);
    assert_eq!(engine.tokens("first"), engine.tokens("second"));
}

#[test]
fn b012_hits_say_what_misses_say() {
    let mut engine = Engine::new(config(32, 4));
    let long = prompt(3, 11);
    for id in ["cold", "warm"] {
        engine.add(id, long.clone(), greedy(7));
        engine.drain(10);
    }
    let other = [&long[..9], &[4, 4, 4]].concat();
    engine.add("other", other.clone(), greedy(7));
    engine.drain(10);
    assert_eq!(engine.tokens("cold"), solo(&long, &greedy(7)));
    assert_eq!(engine.tokens("warm"), solo(&long, &greedy(7)));
    assert_eq!(engine.tokens("other"), solo(&other, &greedy(7)));
    assert_eq!(["cold", "warm", "other"].map(|id| engine.output(id).num_cached_tokens), [0, 8, 8]);
}

/// A step of single tokens may be one kernel that stores their keys and reads all that came before.
#[test]
fn a_step_of_single_tokens_reads_no_block_that_it_completes() {
    let known = [prompt(1, 2), solo(&prompt(1, 2), &greedy(2))[0].clone()].concat();
    let mut engine = Engine::new(config(32, 4));
    engine.add("a", prompt(1, 2), greedy(3));
    engine.step().unwrap();
    engine.step().unwrap();
    engine.add("b", [&known[..], &[9]].concat(), greedy(2));
    let plan = engine.step().unwrap();
    assert_eq!(plan.header(Header::NumTokens), 1 + 5);
    let mut engine = Engine::new(config(32, 4));
    engine.add("a", prompt(1, 2), greedy(3));
    engine.drain(10);
    engine.add("b", [&known[..], &[9]].concat(), greedy(2));
    assert_eq!(engine.step().unwrap().header(Header::NumTokens), 1, "it is there when the text has ended");
}

/// Two requests of 34 + 35 tokens in 7 blocks of 16: one is preempted.
fn preempting(num_blocks: usize) -> Engine {
    let mut config = config(num_blocks, 16);
    config.max_model_len = 80;
    Engine::new(config)
}

#[test]
fn b014_after_a_preemption_tokens_are_counted_behind_the_hit() {
    let mut engine = preempting(7);
    engine.add("a", prompt(1, 34), greedy(35));
    engine.add("b", prompt(2, 34), greedy(35));
    while engine.group("b").num_preemptions == 0 {
        engine.step().unwrap();
    }
    let said = engine.group("b").sequences[0].history.output.len();
    // B's full blocks outlive the preemption: with A gone it goes on behind them.
    engine.scheduler.abort("a");
    let plan = engine.step().unwrap();
    let cached = (34 + said - 1) / 16 * 16;
    assert!(cached >= 32);
    assert_eq!(plan.section(Section::Positions)[0] as usize, cached);
    assert_eq!(plan.header(Header::NumTokens) as usize, 34 + said - cached);
    engine.drain(50);
    assert_eq!(engine.tokens("b"), solo(&prompt(2, 34), &greedy(35)));
}

fn cached_tokens(engine: &mut Engine, id: &str, options: RequestOptions) -> usize {
    engine.scheduler.add_request(id, prompt(1, 9), greedy(3), options).unwrap();
    engine.drain(10);
    engine.output(id).num_cached_tokens
}

#[test]
fn b015_adapters_of_other_weights_share_nothing() {
    let mut engine = Engine::new(config(32, 4));
    let adapter = |adapter_id| RequestOptions { adapter_id, ..RequestOptions::default() };
    assert_eq!(cached_tokens(&mut engine, "a", adapter(1)), 0);
    assert_eq!(cached_tokens(&mut engine, "b", adapter(2)), 0);
    assert_eq!(cached_tokens(&mut engine, "base", adapter(0)), 0);
    assert_eq!(cached_tokens(&mut engine, "a again", adapter(1)), 8);
    assert_eq!(cached_tokens(&mut engine, "base again", adapter(0)), 8);
}

#[test]
fn s051_salts_share_nothing_with_one_another() {
    let mut engine = Engine::new(config(32, 4));
    let salt = |salt: &str| RequestOptions { cache_salt: Some(salt.to_owned()), ..RequestOptions::default() };
    assert_eq!(cached_tokens(&mut engine, "1", salt("A")), 0);
    assert_eq!(cached_tokens(&mut engine, "2", salt("B")), 0);
    assert_eq!(cached_tokens(&mut engine, "3", RequestOptions::default()), 0);
    assert_eq!(cached_tokens(&mut engine, "4", salt("A")), 8);
    assert_eq!(cached_tokens(&mut engine, "5", salt("B")), 8);
}

#[test]
fn a_salt_is_not_mistaken_for_an_adapter() {
    let mut engine = Engine::new(config(32, 4));
    let options = |adapter_id, salt: &str| RequestOptions {
        adapter_id,
        cache_salt: Some(salt.to_owned()),
        ..RequestOptions::default()
    };
    assert_eq!(cached_tokens(&mut engine, "1", options(0, "\u{1}")), 0);
    assert_eq!(cached_tokens(&mut engine, "2", options(1, "")), 0);
}

#[test]
fn b019_recomputation_is_no_hit() {
    let mut engine = preempting(7);
    engine.add("a", prompt(1, 34), greedy(35));
    engine.add("b", prompt(2, 34), greedy(35));
    engine.drain(200);
    let stats = engine.scheduler.stats();
    assert!(stats.counters.num_recomputations > 0);
    assert_eq!((stats.counters.prefix_queries, stats.counters.prefix_hits), (68, 0));
    assert_eq!(stats.counters.prompt_tokens, 68);
}

#[test]
fn b020_a_prompt_that_is_a_prefix_of_an_earlier_one() {
    let mut engine = Engine::new(config(32, 4));
    engine.add("three turns", prompt(1, 30), greedy(5));
    engine.drain(10);
    for (len, cached) in [(8, 4), (9, 8), (4, 0), (1, 0)] {
        let id = len.to_string();
        engine.add(&id, prompt(1, len), greedy(5));
        engine.drain(10);
        assert_eq!(engine.output(&id).num_cached_tokens, cached);
        assert_eq!(engine.tokens(&id), solo(&prompt(1, len), &greedy(5)));
    }
}

#[test]
fn b017_prompt_logprobs_compute_the_whole_prompt() {
    let mut engine = Engine::new(config(8, 16));
    for id in ["cold", "warm"] {
        engine.add(id, prompt(1, 33), SamplingParams { prompt_logprobs: Some(1), ..greedy(2) });
        engine.drain(10);
        assert_eq!(engine.output(id).num_cached_tokens, 0);
    }
    let table = |id: &str| engine.output(id).prompt_logprobs.clone().unwrap();
    assert_eq!(table("cold"), table("warm"));
    assert_eq!((table("warm").len(), table("warm").width), (32, 2));
    let ids: Vec<i32> = table("warm").token_ids.iter().step_by(2).copied().collect();
    assert!(ids.iter().zip(&prompt(1, 33)[1..]).all(|(&id, &token)| id == token as i32));
}

#[test]
fn generated_tokens_can_be_found_too() {
    let mut engine = Engine::new(config(32, 4));
    engine.add("turn 1", prompt(1, 6), greedy(8));
    engine.drain(10);
    let answer = engine.tokens("turn 1").concat();
    let turn2 = [prompt(1, 6), answer, vec![3, 4]].concat();
    engine.add("turn 2", turn2.clone(), greedy(4));
    engine.drain(10);
    // The last token of the answer was never computed: 13 tokens make three full blocks.
    assert_eq!(engine.output("turn 2").num_cached_tokens, 12);
    assert_eq!(engine.tokens("turn 2"), solo(&turn2, &greedy(4)));
}

#[test]
fn without_caching_nothing_is_found() {
    let mut config = config(32, 4);
    config.enable_prefix_caching = false;
    let mut engine = Engine::new(config);
    assert_eq!(cached_tokens(&mut engine, "1", RequestOptions::default()), 0);
    assert_eq!(cached_tokens(&mut engine, "2", RequestOptions::default()), 0);
    assert_eq!(engine.scheduler.stats().num_cached_gpu_blocks, 0);
}

#[test]
fn a_reset_forgets_everything_once_idle() {
    let mut engine = Engine::new(config(32, 4));
    assert_eq!(cached_tokens(&mut engine, "1", RequestOptions::default()), 0);
    assert_eq!(engine.scheduler.stats().num_cached_gpu_blocks, 2);
    engine.add("alive", prompt(2, 3), greedy(2));
    assert!(!engine.scheduler.reset_prefix_cache());
    assert_eq!(engine.scheduler.stats().num_cached_gpu_blocks, 2);
    engine.drain(5);
    assert!(engine.scheduler.reset_prefix_cache());
    assert_eq!(engine.scheduler.stats().num_cached_gpu_blocks, 0);
    assert_eq!(cached_tokens(&mut engine, "2", RequestOptions::default()), 0);
}

#[test]
fn hashes_differ_from_process_to_process() {
    let hash = |scheduler: &mut Scheduler| {
        let blocks = scheduler.block_manager();
        blocks.chain_hash(blocks.root_hash("", 0), &[1, 2, 3])
    };
    let mut schedulers = [(); 2].map(|()| Scheduler::new(config(8, 4), None).unwrap());
    assert_eq!(hash(&mut schedulers[0]), hash(&mut schedulers[0]));
    assert_ne!(hash(&mut schedulers[0]), hash(&mut schedulers[1]));
}
