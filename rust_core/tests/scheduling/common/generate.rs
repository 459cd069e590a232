//! Random configurations and requests.

use pyvllm_core::Config;
use pyvllm_core::request::{EarlyStopping, OutputKind, SamplingParams};
use pyvllm_core::scheduler::{Policy, PreemptionMode};

use super::Rng;
use super::model::{Asked, VOCAB};

/// A request, the step at which it comes, and perhaps the one from which on it is not wanted any more.
#[derive(Clone, Debug)]
pub struct Arrival {
    pub asked: Asked,
    pub at: usize,
    pub abort_at: Option<usize>,
}

/// A configuration, often with as little memory as it allows.
pub fn random_config(rng: &mut Rng) -> Config {
    let block_size = rng.pick(&[1, 2, 4, 16]);
    let max_model_len = if block_size == 16 { rng.range(8, 60) } else { rng.range(4, 32) };
    let least = max_model_len.div_ceil(block_size);
    let spare = rng.pick(&[0, 0, 1, 2, least / 2, least, least, 2 * least, 4 * least]);
    let chunked = rng.percent(70);
    let budget = rng.pick(&[1, 2, 5, 7, 13, 16, 32, 64]);
    Config {
        num_gpu_blocks: least + spare,
        num_cpu_blocks: rng.pick(&[0, 2, least, 2 * least, 4 * least]),
        block_size,
        max_num_seqs: rng.pick(&[1, 3, 5, 8, 16, 16]),
        max_num_batched_tokens: if chunked { budget } else { budget.max(max_model_len) },
        max_model_len,
        vocab_size: VOCAB as usize,
        eos_token_ids: rng.pick(&[vec![0], vec![0], vec![0, 1], vec![]]),
        enable_prefix_caching: rng.percent(70),
        enable_chunked_prefill: chunked,
        policy: if rng.percent(30) { Policy::Priority } else { Policy::Fcfs },
        preemption_mode: rng.pick(&[PreemptionMode::Auto, PreemptionMode::Swap, PreemptionMode::Recompute]),
        max_logprobs: 5,
        graph_sizes: if rng.percent(30) { vec![1, 2, 4, 8] } else { Vec::new() },
        cascade_tokens: usize::from(rng.percent(50)),
        seed: rng.next(),
    }
}

fn random_params(rng: &mut Rng, has_text: bool, max_num_seqs: usize) -> SamplingParams {
    let mut params = SamplingParams {
        temperature: if rng.percent(50) { 0.0 } else { 1.0 },
        seed: Some(rng.next() as i64),
        max_tokens: if rng.percent(20) { None } else { Some(rng.range(1, 20) as i64) },
        ignore_eos: rng.percent(20),
        output_kind: rng.pick(&[OutputKind::FinalOnly, OutputKind::Cumulative, OutputKind::Delta]),
        include_stop_str_in_output: rng.percent(30),
        ..SamplingParams::default()
    };
    if rng.percent(15) {
        params.min_tokens = rng.range(0, params.max_tokens.map_or(3, |max| max.min(4)) as usize) as i64;
    }
    if rng.percent(15) {
        params.stop_token_ids = vec![rng.range(1, 6) as i64];
    }
    match rng.range(0, 29) {
        0 => params.repetition_penalty = 1.3,
        1 => params.presence_penalty = 0.5,
        2 => params.frequency_penalty = -0.5,
        3 => params.logit_bias = vec![(5, 1.5), (9, -3.0)],
        4 => params.logprobs = Some(rng.range(0, 3) as i64),
        5..=7 => params.prompt_logprobs = Some(rng.range(0, 2) as i64),
        _ => {}
    }
    // A few are wider than allowed, and refused.
    let kind = if max_num_seqs >= 5 || rng.percent(5) { rng.range(0, 9) } else { 9 };
    match kind {
        0 | 1 => params.n = rng.range(2, 5) as i64,
        2 => {
            params.n = rng.range(1, 2) as i64;
            params.best_of = Some(rng.range(2, 4) as i64);
        }
        3 | 4 => random_beam(rng, &mut params),
        _ => {}
    }
    if params.best_of.is_some_and(|best_of| best_of > params.n) && !params.use_beam_search {
        params.output_kind = OutputKind::FinalOnly;
    }
    if !params.use_beam_search && rng.percent(8) {
        params.allowed_token_ids = Some(vec![0, 7, 8, 11, 12]);
    }
    if rng.percent(12) {
        // Likely tokens, so that words are often begun: of one token, and of several, which no step may run ahead of.
        let first = || [2, 3, 4, 5, 6];
        params.bad_word_ids = first().iter().flat_map(|&a| first().map(|b| vec![a, b])).collect();
        params.bad_word_ids.extend([vec![9], vec![7, 8, 10]]);
    }
    if !params.use_beam_search && has_text && rng.percent(25) {
        params.stop = rng.pick(&[vec!["f"], vec!["gh", "c"], vec!["k", "zzz"]]).iter().map(|&s| s.into()).collect();
    }
    params
}

fn random_beam(rng: &mut Rng, params: &mut SamplingParams) {
    params.use_beam_search = true;
    params.temperature = 0.0;
    let width = rng.range(2, 4) as i64;
    params.n = rng.range(1, width as usize) as i64;
    params.best_of = Some(width);
    params.length_penalty = rng.pick(&[1.0, 0.0, -1.0, 2.0, 0.5]);
    params.early_stopping = rng.pick(&[EarlyStopping::Heuristic, EarlyStopping::Always, EarlyStopping::Never]);
}

/// Requests, many of which share prefixes.
pub fn random_arrivals(rng: &mut Rng, config: &Config, has_text: bool) -> Vec<Arrival> {
    let token = |rng: &mut Rng| rng.range(0, VOCAB as usize - 1) as u32;
    let bases: [Vec<u32>; 2] = [(); 2].map(|()| (0..config.max_model_len).map(|_| token(rng)).collect());
    let count = rng.range(1, 9);
    let mut at = 0;
    (0..count)
        .map(|_| {
            // Short prompts with long outputs are what makes memory run out.
            let longest = rng.pick(&[config.max_model_len - 1, config.max_model_len / 4, 3, 3]);
            let len = rng.range(1, longest);
            let shared = rng.range(0, len);
            let mut prompt = bases[rng.range(0, 1)][..shared].to_vec();
            prompt.extend((shared..len).map(|_| token(rng)));
            at += rng.pick(&[0, 0, 0, 1, 2, 6]);
            let asked = Asked {
                prompt,
                params: random_params(rng, has_text, config.max_num_seqs),
                salt: rng.percent(20).then(|| "salt".to_owned()),
                priority: rng.range(0, 2) as i64,
                eos: config.eos_token_ids.clone(),
                max_model_len: config.max_model_len,
                has_text,
            };
            Arrival { asked, at, abort_at: rng.percent(12).then(|| at + rng.range(0, 12)) }
        })
        .collect()
}
