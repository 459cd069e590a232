//! KV blocks: reference counts, least-recently-used free list, copy-on-write, prefix cache, swap.
//!
//! A block is free iff its count is 0. A freed block keeps its hash, and can be found by it, until it is handed out
//! again; blocks without a hash are handed out first, then cached ones, the longest unused first.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use hashbrown::HashMap;
use siphasher::sip128::{Hasher128, SipHasher13};

use crate::fault::{Fault, Faults};

/// A block's number, on the device or on the host.
pub type BlockId = u32;
/// Hash of a block's tokens and of all before them; 0 is none.
pub type BlockHash = u128;

const NONE: u32 = u32::MAX;

/// A sequence's blocks, in order. Copied only by [`BlockManager::fork`], ended only by [`BlockManager::release`].
#[derive(Debug, Default)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
    on_host: bool,
}

impl BlockTable {
    /// The blocks, in order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Blocks held.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no block is held.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether the blocks are swapped out: ids of the host pool, not of the device.
    pub fn is_on_host(&self) -> bool {
        self.on_host
    }
}

/// Reference counts of one pool, and its free blocks as a list from next-to-be-used to last.
#[derive(Debug)]
struct Pool {
    counts: Vec<u32>,
    previous: Vec<u32>,
    next: Vec<u32>,
    first: u32,
    last: u32,
    num_free: usize,
}

impl Pool {
    fn new(num_blocks: usize) -> Self {
        let mut pool = Self {
            counts: vec![0; num_blocks],
            previous: vec![NONE; num_blocks],
            next: vec![NONE; num_blocks],
            first: NONE,
            last: NONE,
            num_free: 0,
        };
        (0..num_blocks as u32).for_each(|block| pool.push_back(block));
        pool
    }

    fn push_back(&mut self, block: BlockId) {
        self.previous[block as usize] = self.last;
        self.next[block as usize] = NONE;
        match self.last {
            NONE => self.first = block,
            last => self.next[last as usize] = block,
        }
        self.last = block;
        self.num_free += 1;
    }

    fn push_front(&mut self, block: BlockId) {
        self.next[block as usize] = self.first;
        self.previous[block as usize] = NONE;
        match self.first {
            NONE => self.last = block,
            first => self.previous[first as usize] = block,
        }
        self.first = block;
        self.num_free += 1;
    }

    fn unlink(&mut self, block: BlockId) {
        let (previous, next) = (self.previous[block as usize], self.next[block as usize]);
        match previous {
            NONE => self.first = next,
            previous => self.next[previous as usize] = next,
        }
        match next {
            NONE => self.last = previous,
            next => self.previous[next as usize] = previous,
        }
        self.num_free -= 1;
    }

    /// Hand out the next free block with count 1.
    fn pop(&mut self) -> Option<BlockId> {
        let block = self.first;
        if block == NONE {
            return None;
        }
        self.unlink(block);
        self.counts[block as usize] = 1;
        Some(block)
    }

    /// Take one more reference, out of the free list if it is the first.
    fn acquire(&mut self, block: BlockId) {
        if self.counts[block as usize] == 0 {
            self.unlink(block);
        }
        self.counts[block as usize] += 1;
    }

    /// Give one reference back; true if it was the last (the caller puts the block into the free list).
    fn drop_one(&mut self, block: BlockId) -> bool {
        let count = &mut self.counts[block as usize];
        debug_assert!(*count > 0, "block {block} released twice");
        *count -= 1;
        *count == 0
    }
}

/// All KV blocks of the engine. Blocks are of `block_size` tokens.
#[derive(Debug)]
pub struct BlockManager {
    block_size: usize,
    device: Pool,
    host: Pool,
    hashes: Vec<BlockHash>,
    cache: HashMap<BlockHash, BlockId>,
    caching: bool,
    keys: (u64, u64),
    num_copies: u64,
    /// Test only: the fault planted in this manager.
    pub faults: Faults,
}

impl BlockManager {
    /// A manager of `num_device_blocks` and, for swapping, `num_host_blocks`.
    pub fn new(num_device_blocks: usize, num_host_blocks: usize, block_size: usize, caching: bool) -> Self {
        let random = || RandomState::new().build_hasher().finish();
        Self {
            block_size,
            device: Pool::new(num_device_blocks),
            host: Pool::new(num_host_blocks),
            hashes: vec![0; num_device_blocks],
            cache: HashMap::new(),
            caching,
            keys: (random(), random()),
            num_copies: 0,
            faults: Faults::default(),
        }
    }

    /// Tokens a block holds.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks that hold `num_tokens`.
    pub fn blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// Device blocks no table holds, cached ones included.
    pub fn num_free(&self) -> usize {
        self.device.num_free
    }

    /// Device blocks in all.
    pub fn num_device_blocks(&self) -> usize {
        self.device.counts.len()
    }

    /// Host blocks in all.
    pub fn num_host_blocks(&self) -> usize {
        self.host.counts.len()
    }

    /// Host blocks no table holds.
    pub fn num_free_host(&self) -> usize {
        self.host.num_free
    }

    /// Free device blocks that the prefix cache can still serve.
    pub fn num_cached_free(&self) -> usize {
        self.cache.values().filter(|&&block| self.device.counts[block as usize] == 0).count()
    }

    /// Tables that hold a device block.
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.device.counts[block as usize]
    }

    /// Blocks copied on write so far.
    pub fn num_copies(&self) -> u64 {
        self.num_copies
    }

    fn allocate(&mut self) -> Option<BlockId> {
        let block = self.device.pop()?;
        let hash = std::mem::take(&mut self.hashes[block as usize]);
        if hash != 0 && !self.faults.has(Fault::StaleCacheEntry) {
            self.cache.remove(&hash);
        }
        Some(block)
    }

    fn free(&mut self, block: BlockId) {
        if self.device.drop_one(block) {
            if self.hashes[block as usize] == 0 {
                self.device.push_front(block);
            } else {
                self.device.push_back(block);
            }
        }
    }

    fn free_host(&mut self, block: BlockId) {
        if self.host.drop_one(block) {
            self.host.push_back(block);
        }
    }

    /// Append blocks until the table has `num_blocks`. The caller has checked that they are free.
    pub fn grow(&mut self, table: &mut BlockTable, num_blocks: usize) {
        while table.blocks.len() < num_blocks {
            let Some(block) = self.allocate() else {
                debug_assert!(false, "grow without free blocks");
                return;
            };
            table.blocks.push(block);
        }
    }

    /// Another table of the same blocks, on the device or on the host.
    #[must_use]
    pub fn fork(&mut self, table: &BlockTable) -> BlockTable {
        let pool = if table.on_host { &mut self.host } else { &mut self.device };
        table.blocks.iter().for_each(|&block| pool.acquire(block));
        BlockTable { blocks: table.blocks.clone(), on_host: table.on_host }
    }

    /// Give all blocks back, the last first, so that a prefix outlives its continuations in the cache.
    pub fn release(&mut self, table: BlockTable) {
        for block in table.blocks.into_iter().rev() {
            if table.on_host { self.free_host(block) } else { self.free(block) }
        }
    }

    /// Whether writing into the table's block number `index` needs a copy first.
    pub fn is_shared(&self, table: &BlockTable, index: usize) -> bool {
        table.blocks.get(index).is_some_and(|&block| self.device.counts[block as usize] > 1)
    }

    /// Copy on write: make block number `index` the table's own, adding (source, destination) to `copies`.
    pub fn make_writable(&mut self, table: &mut BlockTable, index: usize, copies: &mut Vec<[i32; 2]>) {
        if !self.is_shared(table, index) || self.faults.has(Fault::NoCopyOnWrite) {
            return;
        }
        let Some(copy) = self.allocate() else {
            debug_assert!(false, "copy-on-write without a free block");
            return;
        };
        let source = std::mem::replace(&mut table.blocks[index], copy);
        copies.push([source as i32, copy as i32]);
        self.num_copies += 1;
        self.free(source);
    }

    // ---- prefix cache ----

    /// Where the chain of hashes starts: everything but the tokens that a block's KV depends on.
    pub fn root_hash(&self, salt: &str, adapter_id: u64) -> BlockHash {
        let mut hasher = SipHasher13::new_with_keys(self.keys.0, self.keys.1);
        hasher.write(&adapter_id.to_le_bytes());
        hasher.write(salt.as_bytes());
        hasher.finish128().as_u128().max(1)
    }

    /// Hash of a full block after the blocks that `parent` stands for.
    pub fn chain_hash(&self, parent: BlockHash, tokens: &[u32]) -> BlockHash {
        let mut hasher = SipHasher13::new_with_keys(self.keys.0, self.keys.1);
        hasher.write(&parent.to_le_bytes());
        let mut bytes = [0; 256];
        for part in tokens.chunks(64) {
            for (slot, token) in bytes.chunks_exact_mut(4).zip(part) {
                slot.copy_from_slice(&token.to_le_bytes());
            }
            hasher.write(&bytes[..4 * part.len()]);
        }
        hasher.finish128().as_u128().max(1)
    }

    /// Cached blocks of the longest prefix of `hashes`, and how many of them are free.
    pub fn match_prefix(&self, hashes: &[BlockHash]) -> (usize, usize) {
        if !self.caching {
            return (0, 0);
        }
        let found = hashes.iter().map_while(|hash| self.cache.get(hash));
        found.fold((0, 0), |(matched, free), &block| {
            (matched + 1, free + usize::from(self.device.counts[block as usize] == 0))
        })
    }

    /// Put the cached blocks of `hashes`, all of which [`Self::match_prefix`] has just found, into an empty table.
    pub fn adopt(&mut self, table: &mut BlockTable, hashes: &[BlockHash]) {
        debug_assert!(table.is_empty());
        for hash in hashes {
            let block = self.cache[hash];
            self.device.acquire(block);
            table.blocks.push(block);
        }
    }

    /// Let the prefix cache find block number `index` of a table by `hash`. The block is full, and the steps that
    /// write its KV are scheduled. If another block serves the hash already, that one stays.
    pub fn publish(&mut self, table: &BlockTable, index: usize, hash: BlockHash) {
        let block = table.blocks[index];
        if self.caching && self.hashes[block as usize] == 0 && !self.cache.contains_key(&hash) {
            self.cache.insert(hash, block);
            self.hashes[block as usize] = hash;
        }
    }

    /// Forget all hashes.
    pub fn clear_cache(&mut self) {
        self.cache.clear();
        self.hashes.fill(0);
    }

    // ---- swap ----

    /// Distinct blocks of some tables of one pool.
    pub fn distinct<'a>(tables: impl Iterator<Item = &'a BlockTable>) -> usize {
        let mut blocks: Vec<BlockId> = tables.flat_map(|table| table.blocks.iter().copied()).collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks.len()
    }

    /// Move a group's tables to the host, keeping what they share; adds (device, host) to `moves`. False, and
    /// nothing done, if the host pool is too full.
    pub fn swap_out(&mut self, tables: &mut [&mut BlockTable], moves: &mut Vec<[i32; 2]>) -> bool {
        if Self::distinct(tables.iter().map(|table| &**table)) > self.host.num_free {
            return false;
        }
        let mut moved: HashMap<BlockId, BlockId> = HashMap::new();
        for table in tables {
            let mut left = Vec::with_capacity(table.len());
            for block in &mut table.blocks {
                let device_block = *block;
                left.push(device_block);
                *block = match moved.get(&device_block) {
                    Some(&host_block) => {
                        self.host.acquire(host_block);
                        host_block
                    }
                    None => self.host.pop().unwrap_or(NONE),
                };
                if moved.insert(device_block, *block).is_none() {
                    moves.push([device_block as i32, *block as i32]);
                }
            }
            table.on_host = true;
            left.into_iter().rev().for_each(|block| self.free(block));
        }
        true
    }

    /// Move a group's tables back to the device; adds (host, device) to `moves`. The caller has checked that
    /// [`Self::distinct`] blocks are free.
    pub fn swap_in(&mut self, tables: &mut [&mut BlockTable], moves: &mut Vec<[i32; 2]>) {
        let mut moved: HashMap<BlockId, BlockId> = HashMap::new();
        for table in tables {
            for block in &mut table.blocks {
                let host_block = *block;
                *block = if let Some(&device_block) = moved.get(&host_block) {
                    if !self.faults.has(Fault::SwapLosesReference) {
                        self.device.acquire(device_block);
                    }
                    device_block
                } else {
                    let device_block = self.allocate().unwrap_or(NONE);
                    moves.push([host_block as i32, device_block as i32]);
                    moved.insert(host_block, device_block);
                    device_block
                };
                self.free_host(host_block);
            }
            table.on_host = false;
        }
    }

    // ---- invariants ----

    /// Check counts, free lists and cache against the live tables (design invariants 1 and 3, as far as seen here).
    pub fn check(&self, tables: &[&BlockTable]) -> Result<(), String> {
        check_pool("device", &self.device, tables.iter().filter(|table| !table.on_host))?;
        check_pool("host", &self.host, tables.iter().filter(|table| table.on_host))?;
        for (&hash, &block) in &self.cache {
            if self.hashes[block as usize] != hash {
                return Err(format!("cache entry of device block {block} is stale"));
            }
        }
        Ok(())
    }
}

fn check_pool<'a>(name: &str, pool: &Pool, tables: impl Iterator<Item = &'a &'a BlockTable>) -> Result<(), String> {
    let mut counts = vec![0; pool.counts.len()];
    tables.flat_map(|table| &table.blocks).for_each(|&block| counts[block as usize] += 1);
    if let Some(block) = (0..counts.len()).find(|&block| counts[block] != pool.counts[block]) {
        let (held, counted) = (counts[block], pool.counts[block]);
        return Err(format!("{name} block {block} is in {held} tables, its count is {counted}"));
    }
    let mut free = 0;
    let mut block = pool.first;
    while block != NONE {
        if pool.counts[block as usize] != 0 {
            return Err(format!("{name} block {block} is free and in use"));
        }
        free += 1;
        block = pool.next[block as usize];
    }
    let unused = counts.iter().filter(|&&count| count == 0).count();
    if free == unused && free == pool.num_free {
        return Ok(());
    }
    Err(format!("{name} pool: {free} blocks in the free list, {unused} unused, {} counted", pool.num_free))
}
