//! Faults planted on purpose: each must make the oracle memory test fail, and none must pass it.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};

use pyvllm_core::fault::Fault;

use crate::common::scenario::{self, Mode};

/// Scenarios until one fails, of at most `most`. The invariants are not checked: memory itself must tell.
fn scenarios_until_caught(fault: Option<Fault>, ahead: bool, most: u64) -> Option<u64> {
    let mode = Mode { ahead, check: false };
    let plant = |scheduler: &mut pyvllm_core::Scheduler| {
        if let Some(fault) = fault {
            scheduler.block_manager().faults.plant(fault);
        }
    };
    let hook = take_hook();
    set_hook(Box::new(|_| {})); // assertions of the core are a way of being caught: no need to print them
    let fails = |&seed: &u64| !matches!(catch_unwind(AssertUnwindSafe(|| scenario::run(seed, mode, plant))), Ok(Ok(_)));
    let caught = (0..most).find(fails);
    println!("{fault:?}: caught by scenario {caught:?}");
    set_hook(hook);
    caught
}

#[test]
fn no_fault_passes() {
    assert_eq!(scenarios_until_caught(None, false, 5_000), None);
    assert_eq!(scenarios_until_caught(None, true, 5_000), None);
}

#[test]
fn no_copy_on_write_is_caught() {
    assert!(scenarios_until_caught(Some(Fault::NoCopyOnWrite), false, 1_000).is_some());
}

#[test]
fn a_stale_cache_entry_is_caught() {
    assert!(scenarios_until_caught(Some(Fault::StaleCacheEntry), false, 1_000).is_some());
}

#[test]
fn publishing_uncomputed_blocks_is_caught() {
    assert!(scenarios_until_caught(Some(Fault::PublishUncomputed), false, 5_000).is_some());
}

#[test]
fn a_reference_lost_in_a_swap_is_caught() {
    assert!(scenarios_until_caught(Some(Fault::SwapLosesReference), false, 5_000).is_some());
}

#[test]
fn beams_running_ahead_are_caught() {
    assert!(scenarios_until_caught(Some(Fault::BeamsRunAhead), true, 1_000).is_some());
}
