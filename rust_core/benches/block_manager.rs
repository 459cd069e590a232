//! Blocks of sequences of 2,048 tokens: fork with copy-on-write, prefix match, swap.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pyvllm_core::block_manager::{BlockHash, BlockManager, BlockTable};

const BLOCK_SIZE: usize = 16;
const NUM_TOKENS: usize = 2_048;
const NUM_BLOCKS: usize = NUM_TOKENS / BLOCK_SIZE;
const NUM_SEQUENCES: [usize; 4] = [1, 64, 256, 1_024];

/// Every sequence is forked, the copy's last block is made its own, and the copy is released.
fn fork_and_copy(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("fork + copy-on-write");
    group.sample_size(10).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for num_sequences in NUM_SEQUENCES {
        let mut blocks = BlockManager::new(num_sequences * (NUM_BLOCKS + 1), 0, BLOCK_SIZE, true);
        let tables: Vec<BlockTable> = (0..num_sequences).map(|_| table(&mut blocks)).collect();
        let mut copies = Vec::with_capacity(num_sequences);
        group.throughput(Throughput::Elements(num_sequences as u64));
        group.bench_function(BenchmarkId::from_parameter(num_sequences), |bencher| {
            bencher.iter(|| {
                copies.clear();
                let mut forks: Vec<BlockTable> = tables.iter().map(|table| blocks.fork(table)).collect();
                for fork in &mut forks {
                    blocks.make_writable(fork, NUM_BLOCKS - 1, &mut copies);
                }
                assert_eq!(copies.len(), num_sequences);
                for fork in forks {
                    blocks.release(fork);
                }
            });
        });
    }
    group.finish();
}

fn table(blocks: &mut BlockManager) -> BlockTable {
    let mut table = BlockTable::default();
    blocks.grow(&mut table, NUM_BLOCKS);
    table
}

fn hashes(blocks: &BlockManager, prompt: &[u32]) -> Vec<BlockHash> {
    let mut hash = blocks.root_hash("", 0);
    let chain = prompt.chunks_exact(BLOCK_SIZE).map(|tokens| {
        hash = blocks.chain_hash(hash, tokens);
        hash
    });
    chain.collect()
}

/// A prompt is hashed, found block by block, and its blocks are taken and released again.
fn prefix_match(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("prefix match");
    group.sample_size(10).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for num_sequences in NUM_SEQUENCES {
        let mut blocks = BlockManager::new(num_sequences * NUM_BLOCKS, 0, BLOCK_SIZE, true);
        let prompt = |i: usize| -> Vec<u32> { (0..NUM_TOKENS).map(|token| (i * 7_919 + token * 31) as u32).collect() };
        let prompts: Vec<Vec<u32>> = (0..num_sequences).map(prompt).collect();
        for prompt in &prompts {
            let table = table(&mut blocks);
            for (index, hash) in hashes(&blocks, prompt).into_iter().enumerate() {
                blocks.publish(&table, index, hash);
            }
            blocks.release(table);
        }
        let mut next = 0;
        group.throughput(Throughput::Elements(NUM_TOKENS as u64));
        group.bench_function(BenchmarkId::from_parameter(num_sequences), |bencher| {
            bencher.iter(|| {
                next = (next + 1) % num_sequences;
                let hashes = hashes(&blocks, black_box(&prompts[next]));
                let (matched, _) = blocks.match_prefix(&hashes);
                assert_eq!(matched, NUM_BLOCKS);
                let mut table = BlockTable::default();
                blocks.adopt(&mut table, &hashes);
                blocks.release(table);
            });
        });
    }
    group.finish();
}

/// A sequence goes to the host and back.
fn swap(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("swap out + in");
    group.sample_size(10).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for num_sequences in NUM_SEQUENCES {
        let total = num_sequences * NUM_BLOCKS;
        let mut blocks = BlockManager::new(total, total, BLOCK_SIZE, true);
        let mut tables: Vec<BlockTable> = (0..num_sequences).map(|_| table(&mut blocks)).collect();
        let mut moves = Vec::with_capacity(2 * NUM_BLOCKS);
        group.throughput(Throughput::Elements(num_sequences as u64));
        group.bench_function(BenchmarkId::from_parameter(num_sequences), |bencher| {
            bencher.iter(|| {
                for table in &mut tables {
                    moves.clear();
                    assert!(blocks.swap_out(&mut [table], &mut moves));
                    blocks.swap_in(&mut [table], &mut moves);
                }
            });
        });
    }
    group.finish();
}

criterion_group!(benches, fork_and_copy, prefix_match, swap);
criterion_main!(benches);
