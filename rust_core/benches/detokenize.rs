//! Text from sampled tokens: one token for each of many sequences a step, as the engine does. Time per token is the
//! inverse of the printed throughput.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pyvllm_core::detokenizer::{Detokenizer, StopStrings, Vocabulary};

const NUM_SEQUENCES: [usize; 4] = [1, 64, 256, 1_024];
const NUM_STEPS: usize = 2_048;

/// As many ids as a small model has: the bytes, then words of 1 to 8 letters, some with a space before them.
fn vocabulary() -> Vocabulary {
    let words = (0..49_152 - 256usize).map(|index| {
        let letters = (0..=index % 8).map(|place| b'a' + (index / 7 + place * index) as u8 % 26);
        let space = (index % 3 != 0).then_some(b' ');
        space.into_iter().chain(letters).collect()
    });
    let tokens = (0..=255u8).map(|byte| vec![byte]).chain(words);
    Vocabulary::new(tokens, &[0, 1, 2], &[], false)
}

/// [step][sequence], every sequence its own tokens.
fn steps(num_sequences: usize, token: impl Fn(usize) -> u32) -> Vec<Vec<u32>> {
    let step = |step| (0..num_sequences).map(|sequence| token(step + sequence * 7)).collect();
    (0..NUM_STEPS).map(step).collect()
}

fn run(vocab: &Vocabulary, stops: &StopStrings, plan: &[Vec<u32>], texts: &mut [String]) -> usize {
    texts.iter_mut().for_each(String::clear);
    let mut states = vec![Detokenizer::new(vocab, &[], true); texts.len()];
    let mut num_certain = 0;
    for ids in plan {
        for ((state, text), &id) in states.iter_mut().zip(&mut *texts).zip(ids) {
            let new_from = text.len();
            state.push(vocab, id, text);
            if !stops.is_empty() {
                assert!(stops.find(text, new_from).is_none());
                num_certain += text.len() - stops.held_back(text);
            }
        }
    }
    num_certain
}

fn detokenize(criterion: &mut Criterion) {
    let vocab = vocabulary();
    let no_stops = StopStrings::new(&[]);
    let stops = StopStrings::new(&["\n\nHuman:", "<|im_end|>", "```"].map(String::from));
    let scattered = |index: usize| (index.wrapping_mul(2_654_435_761) >> 7) as u32 % 48_896 + 256;
    let devanagari = |index: usize| u32::from("नमस्ते".as_bytes()[index % 18]);

    let mut group = criterion.benchmark_group("detokenize");
    group.sample_size(10);
    for num_sequences in NUM_SEQUENCES {
        let words = steps(num_sequences, scattered);
        let bytes = steps(num_sequences, devanagari);
        group.throughput(Throughput::Elements((num_sequences * NUM_STEPS) as u64));
        for (name, steps, stops) in [
            ("words", &words, &no_stops),
            ("words, 3 stop strings", &words, &stops),
            ("single bytes", &bytes, &no_stops),
        ] {
            let mut texts = vec![String::new(); num_sequences];
            group.bench_function(BenchmarkId::new(name, num_sequences), |bencher| {
                bencher.iter(|| run(&vocab, stops, black_box(steps), &mut texts));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, detokenize);
criterion_main!(benches);
