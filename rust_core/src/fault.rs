//! Faults that can be planted on purpose, to show that the oracle memory test catches each of them.
//!
//! Without the feature `planted-faults` no fault can be set and every question is answered "no" at compile time.

/// A fault in memory management.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Shared blocks are written in place.
    NoCopyOnWrite,
    /// A block that is handed out again can still be found by its old hash.
    StaleCacheEntry,
    /// Blocks are published before the steps that fill them are scheduled.
    PublishUncomputed,
    /// Tables that shared a block before a swap count it once afterwards.
    SwapLosesReference,
    /// Beam groups are scheduled before their last step's candidates are known.
    BeamsRunAhead,
}

/// The fault planted in one scheduler, if any.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    #[cfg(feature = "planted-faults")]
    planted: Option<Fault>,
}

impl Faults {
    /// Plant a fault.
    #[cfg(feature = "planted-faults")]
    pub fn plant(&mut self, fault: Fault) {
        self.planted = Some(fault);
    }

    /// Whether this fault is planted.
    #[cfg(feature = "planted-faults")]
    pub fn has(self, fault: Fault) -> bool {
        self.planted == Some(fault)
    }

    /// Whether this fault is planted: never, without the feature.
    #[cfg(not(feature = "planted-faults"))]
    #[allow(clippy::unused_self)]
    pub fn has(self, _fault: Fault) -> bool {
        false
    }
}
