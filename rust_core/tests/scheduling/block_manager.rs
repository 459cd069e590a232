//! Blocks, reference counts, copy-on-write: cases from the field.

use pyvllm_core::block_manager::{BlockManager, BlockTable};
use pyvllm_core::request::SamplingParams;

use crate::common::{Engine, Rng, config, greedy, prompt, solo};

#[test]
fn b001_forked_tables_give_back_each_block_once() {
    let mut blocks = BlockManager::new(6, 0, 4, true);
    let (mut a, mut copies) = (BlockTable::default(), Vec::new());
    blocks.grow(&mut a, 3);
    let mut b = blocks.fork(&a);
    assert!(a.blocks().iter().all(|&block| blocks.ref_count(block) == 2));
    blocks.make_writable(&mut b, 2, &mut copies);
    blocks.grow(&mut b, 4);
    assert_eq!(copies.len(), 1);
    assert_eq!((blocks.num_free(), a.blocks()[..2].to_vec()), (1, b.blocks()[..2].to_vec()));
    blocks.release(a);
    blocks.release(b);
    assert_eq!(blocks.num_free(), 6);
    assert!((0..6).all(|block| blocks.ref_count(block) == 0));
    blocks.check(&[]).unwrap();
}

#[test]
fn b004_a_shared_tail_is_copied_once_and_full_blocks_stay_shared() {
    let mut engine = Engine::new(config(16, 4));
    let params = SamplingParams { n: 2, temperature: 1.0, seed: Some(1), ..greedy(6) };
    engine.add("x", prompt(1, 5), params.clone());
    engine.step();
    engine.step();
    let tables = engine.tables("x");
    assert_eq!(tables[0][0], tables[1][0]);
    assert_ne!(tables[0][1], tables[1][1]);
    assert_eq!(engine.scheduler.block_manager().ref_count(tables[0][0]), 2);
    engine.drain(10);
    assert_eq!(engine.scheduler.stats().num_copies, 1);
    let expected = solo(&prompt(1, 5), &params);
    assert_ne!(expected[0], expected[1]);
    assert_eq!(engine.tokens("x"), expected);
}

#[test]
fn b005_evicted_block_is_not_found() {
    let mut blocks = BlockManager::new(2, 0, 4, true);
    let hash = blocks.chain_hash(blocks.root_hash("", 0), &[1, 2, 3, 4]);
    let mut a = BlockTable::default();
    blocks.grow(&mut a, 1);
    blocks.publish(&a, 0, hash);
    blocks.release(a);
    assert_eq!(blocks.match_prefix(&[hash]), (1, 1));
    let mut b = BlockTable::default();
    blocks.grow(&mut b, 1);
    assert_eq!(blocks.match_prefix(&[hash]), (1, 1), "a block that was never used goes first");
    blocks.grow(&mut b, 2);
    assert_eq!(blocks.match_prefix(&[hash]), (0, 0));
    blocks.check(&[&b]).unwrap();
}

#[test]
fn b008_blocks_follow_the_tokens_at_block_boundaries() {
    for len in [3, 4, 5, 8] {
        for max_tokens in 1..=5 {
            let mut engine = Engine::new(config(8, 4));
            engine.add("x", prompt(1, len), greedy(max_tokens));
            for output in 0..max_tokens as usize {
                engine.launch().unwrap();
                assert_eq!(engine.tables("x")[0].len(), (len + output).div_ceil(4), "prompt {len}, output {output}");
                engine.commit();
            }
            engine.drain(1);
        }
    }
}

#[test]
fn b009_nothing_leaks_over_a_long_mix() {
    let mut rng = Rng(9);
    let mut config = config(12, 2);
    config.num_cpu_blocks = 8;
    let mut engine = Engine::new(config);
    for i in 0..2_000 {
        let params = SamplingParams {
            n: rng.range(1, 3) as i64,
            ignore_eos: rng.percent(50),
            stop_token_ids: vec![5],
            max_tokens: Some(rng.range(1, 4) as i64),
            ..greedy(1)
        };
        engine.add(&i.to_string(), prompt(rng.range(0, 5) as u32, rng.range(1, 6)), params);
        engine.step();
        if rng.percent(20) {
            engine.scheduler.abort(&rng.range(0, i).to_string());
        }
        if i % 100 == 99 {
            engine.drain(1_000);
            let stats = engine.scheduler.stats();
            assert!(stats.num_cached_gpu_blocks <= stats.num_gpu_blocks);
        }
    }
    let stats = engine.scheduler.stats();
    assert!(stats.counters.num_recomputations + stats.counters.num_swap_outs > 20, "{stats:?}");
    assert!(stats.num_copies > 100, "{stats:?}");
}

#[test]
fn b010_a_waiting_request_owns_no_blocks() {
    let mut config = config(120, 4);
    config.max_model_len = 120;
    config.max_num_batched_tokens = 120;
    config.enable_chunked_prefill = false;
    let mut engine = Engine::new(config);
    engine.add("a", prompt(1, 4), greedy(110));
    engine.add("b", prompt(2, 4), greedy(110));
    engine.step();
    engine.add("long", prompt(3, 119), greedy(1));
    for step in 0..100 {
        engine.step().unwrap();
        assert!(engine.tables("long")[0].is_empty());
        let running = engine.tables("a")[0].len() + engine.tables("b")[0].len();
        assert_eq!(engine.num_free(), 120 - running, "step {step}");
    }
    engine.drain(200);
    assert_eq!(engine.tokens("long"), solo(&prompt(3, 119), &greedy(1)));
}

#[test]
fn b010_a_request_without_room_for_its_sequences_owns_no_blocks() {
    let mut config = config(40, 4);
    config.max_num_seqs = 3;
    let mut engine = Engine::new(config);
    engine.add("a", prompt(1, 4), SamplingParams { n: 2, ..greedy(30) });
    engine.step();
    engine.add("b", prompt(2, 4), SamplingParams { n: 2, ..greedy(30) });
    for _ in 0..25 {
        engine.step().unwrap();
        assert!(engine.tables("b")[0].is_empty());
    }
    engine.drain(100);
}

#[test]
fn tails_are_evicted_before_the_prefixes_they_continue() {
    let mut blocks = BlockManager::new(4, 0, 1, true);
    let mut hash = blocks.root_hash("", 0);
    let mut hashes = Vec::new();
    let mut table = BlockTable::default();
    blocks.grow(&mut table, 4);
    for token in 0..4 {
        hash = blocks.chain_hash(hash, &[token]);
        hashes.push(hash);
        blocks.publish(&table, token as usize, hash);
    }
    blocks.release(table);
    let mut taken = BlockTable::default();
    for used in 1..=4 {
        blocks.grow(&mut taken, used);
        assert_eq!(blocks.match_prefix(&hashes), (4 - used, 4 - used));
    }
}

#[test]
fn the_longest_unused_prefix_is_evicted_first() {
    let mut blocks = BlockManager::new(3, 0, 1, true);
    let root = blocks.root_hash("", 0);
    let hashes: Vec<_> = (0..3).map(|token| blocks.chain_hash(root, &[token])).collect();
    for hash in &hashes {
        let mut table = BlockTable::default();
        blocks.grow(&mut table, 1);
        blocks.publish(&table, 0, *hash);
        blocks.release(table);
    }
    // Using the first again makes the second the longest unused one.
    let mut again = BlockTable::default();
    blocks.adopt(&mut again, &hashes[..1]);
    blocks.release(again);
    let mut other = BlockTable::default();
    blocks.grow(&mut other, 1);
    let found: Vec<_> = hashes.iter().map(|hash| blocks.match_prefix(&[*hash]).0).collect();
    assert_eq!(found, [1, 0, 1]);
}

#[test]
fn a_swap_keeps_what_tables_share() {
    let mut blocks = BlockManager::new(8, 4, 4, true);
    let (mut a, mut moves) = (BlockTable::default(), Vec::new());
    blocks.grow(&mut a, 3);
    let mut b = blocks.fork(&a);
    blocks.make_writable(&mut b, 2, &mut Vec::new());
    assert!(blocks.swap_out(&mut [&mut a, &mut b], &mut moves));
    assert_eq!((moves.len(), blocks.num_free(), blocks.num_free_host()), (4, 8, 0));
    assert_eq!(a.blocks()[..2], b.blocks()[..2]);
    moves.clear();
    blocks.swap_in(&mut [&mut a, &mut b], &mut moves);
    assert_eq!((moves.len(), blocks.num_free(), blocks.num_free_host()), (4, 4, 4));
    assert_eq!(a.blocks()[..2], b.blocks()[..2]);
    assert_ne!(a.blocks()[2], b.blocks()[2]);
    assert_eq!(blocks.ref_count(a.blocks()[0]), 2);
    blocks.check(&[&a, &b]).unwrap();
}

#[test]
fn a_swap_without_room_on_the_host_changes_nothing() {
    let mut blocks = BlockManager::new(4, 2, 4, true);
    let (mut a, mut moves) = (BlockTable::default(), Vec::new());
    blocks.grow(&mut a, 3);
    let before = a.blocks().to_vec();
    assert!(!blocks.swap_out(&mut [&mut a], &mut moves));
    assert_eq!((a.blocks(), moves.len(), blocks.num_free_host()), (&before[..], 0, 2));
    assert!(!a.is_on_host());
}
