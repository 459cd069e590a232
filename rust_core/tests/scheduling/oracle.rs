//! The oracle memory test: under thousands of random schedules every sequence reads exactly its own history, and every
//! request says what its solo run says.
//!
//! `PYVLLM_ORACLE_SEED` runs one scenario (with its backtrace); `PYVLLM_ORACLE_SECONDS` goes on for that long.

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::common::scenario::{self, Coverage, Mode};

const NUM_SCENARIOS: u64 = 50_000;

fn number(name: &str) -> Option<u64> {
    env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} must be a number")))
}

fn run_one(seed: u64, ahead: bool) -> Coverage {
    let mode = Mode { ahead, check: true };
    match catch_unwind(AssertUnwindSafe(|| scenario::run(seed, mode, |_| {}))) {
        Ok(Ok(coverage)) => coverage,
        Ok(Err(what)) => panic!("PYVLLM_ORACLE_SEED={seed} (ahead: {ahead}): {what}"),
        Err(_) => panic!("PYVLLM_ORACLE_SEED={seed} (ahead: {ahead}): a panic, see above"),
    }
}

fn run_all(ahead: bool) {
    if let Some(seed) = number("PYVLLM_ORACLE_SEED") {
        println!("{:?}", run_one(seed, ahead));
        return;
    }
    let end = Instant::now() + Duration::from_secs(number("PYVLLM_ORACLE_SECONDS").unwrap_or(0));
    let mut total = Coverage::default();
    let mut seed = 0;
    while seed < NUM_SCENARIOS || Instant::now() < end {
        total.add(&run_one(seed, ahead));
        seed += 1;
    }
    println!("{total:#?}");
    assert!(total.steps > 5 * total.scenarios && total.finished > total.scenarios);
    assert_eq!(total.ahead > 0, ahead);
    for (what, count) in [
        ("refused", total.refused),
        ("aborted", total.aborted),
        ("recomputed", total.recomputations),
        ("swapped out", total.swap_outs),
        ("swapped in", total.swap_ins),
        ("copied on write", total.copies),
        ("cascades", total.cascades),
        ("prefix hits", total.prefix_hits),
        ("forked", total.forks),
        ("beam searches", total.beams),
        ("best_of", total.ranked),
        ("finished after a preemption", total.preempted_outputs),
        ("beams finished after a preemption", total.preempted_beams),
        ("cache resets", total.resets),
    ] {
        assert!(count > 500, "{what}: only {count} times");
    }
    assert!(!ahead || total.aborted_in_flight > 500);
}

#[test]
fn oracle_synchronous() {
    run_all(false);
}

#[test]
fn oracle_one_step_ahead() {
    run_all(true);
}
