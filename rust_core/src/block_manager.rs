//! KV blocks: reference counts, least-recently-used free list, copy-on-write, prefix cache, swap.
//!
//! A block is free iff its count is 0. A freed block keeps its hash, and can be found by it, until it is handed out
//! again; blocks without a hash are handed out first, then cached ones, the longest unused first.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use siphasher::sip128::{Hasher128, SipHasher13};

use crate::fault::{Fault, Faults};
use crate::pool::{NONE, Pool};

/// A block's number, on the device or on the host.
pub type BlockId = u32;
/// Hash of a block's tokens and of all before them; 0 is none.
pub type BlockHash = u128;

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
    /// Free blocks that have a hash.
    num_cached_free: usize,
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
            // Room for all blocks at once: growing later would hold up a step.
            cache: HashMap::with_capacity(if caching { num_device_blocks } else { 0 }),
            caching,
            keys: (random(), random()),
            num_cached_free: 0,
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
        self.device.num_free()
    }

    /// Device blocks in all.
    pub fn num_device_blocks(&self) -> usize {
        self.device.len()
    }

    /// Host blocks in all.
    pub fn num_host_blocks(&self) -> usize {
        self.host.len()
    }

    /// Host blocks no table holds.
    pub fn num_free_host(&self) -> usize {
        self.host.num_free()
    }

    /// Free device blocks that the prefix cache can still serve.
    pub fn num_cached_free(&self) -> usize {
        self.num_cached_free
    }

    /// Tables that hold a device block.
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.device.count(block)
    }

    /// For each device block, the tables that hold it and whether the prefix cache finds it.
    pub fn device_blocks(&self) -> (Vec<u32>, Vec<bool>) {
        let counts = (0..self.device.len() as BlockId).map(|block| self.device.count(block)).collect();
        (counts, self.hashes.iter().map(|&hash| hash != 0).collect())
    }

    /// Blocks copied on write so far.
    pub fn num_copies(&self) -> u64 {
        self.num_copies
    }

    fn allocate(&mut self) -> Option<BlockId> {
        let block = self.device.pop()?;
        let hash = std::mem::take(&mut self.hashes[block as usize]);
        if hash != 0 {
            self.num_cached_free -= 1;
            if !self.faults.has(Fault::StaleCacheEntry) {
                self.cache.remove(&hash);
            }
        }
        Some(block)
    }

    fn free(&mut self, block: BlockId) {
        if self.device.drop_one(block) {
            if self.hashes[block as usize] == 0 {
                self.device.push_front(block);
            } else {
                self.device.push_back(block);
                self.num_cached_free += 1;
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
        table.blocks.get(index).is_some_and(|&block| self.device.count(block) > 1)
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
        found.fold((0, 0), |(matched, free), &block| (matched + 1, free + usize::from(self.device.count(block) == 0)))
    }

    /// Put the cached blocks of `hashes`, all of which [`Self::match_prefix`] has just found, into an empty table.
    pub fn adopt(&mut self, table: &mut BlockTable, hashes: &[BlockHash]) {
        debug_assert!(table.is_empty());
        for hash in hashes {
            let block = self.cache[hash];
            self.num_cached_free -= usize::from(self.device.count(block) == 0);
            self.device.acquire(block);
            table.blocks.push(block);
        }
    }

    /// Let the prefix cache find block number `index` of a table by `hash`. The block is full, and the steps that
    /// write its KV are scheduled. If another block serves the hash already, that one stays.
    pub fn publish(&mut self, table: &BlockTable, index: usize, hash: BlockHash) {
        let block = table.blocks[index];
        if !self.caching || self.hashes[block as usize] != 0 {
            return;
        }
        if let Entry::Vacant(entry) = self.cache.entry(hash) {
            entry.insert(block);
            self.hashes[block as usize] = hash;
        }
    }

    /// Forget all hashes.
    pub fn clear_cache(&mut self) {
        self.cache.clear();
        self.hashes.fill(0);
        self.num_cached_free = 0;
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
        if Self::distinct(tables.iter().map(|table| &**table)) > self.host.num_free() {
            return false;
        }
        let mut hosts: HashMap<BlockId, BlockId> = HashMap::new();
        for table in tables {
            let mut left = Vec::with_capacity(table.len());
            for block in &mut table.blocks {
                let device_block = *block;
                left.push(device_block);
                *block = match hosts.get(&device_block) {
                    Some(&host_block) => {
                        self.host.acquire(host_block);
                        host_block
                    }
                    None => self.host.pop().unwrap_or(NONE),
                };
                if hosts.insert(device_block, *block).is_none() {
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
        let mut devices: HashMap<BlockId, BlockId> = HashMap::new();
        for table in tables {
            for block in &mut table.blocks {
                let host_block = *block;
                *block = if let Some(&device_block) = devices.get(&host_block) {
                    if !self.faults.has(Fault::SwapLosesReference) {
                        self.device.acquire(device_block);
                    }
                    device_block
                } else {
                    let device_block = self.allocate().unwrap_or(NONE);
                    moves.push([host_block as i32, device_block as i32]);
                    devices.insert(host_block, device_block);
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
        let blocks = |on_host| tables.iter().filter(move |table| table.on_host == on_host).map(|table| table.blocks());
        self.device.check("device", blocks(false))?;
        self.host.check("host", blocks(true))?;
        let mut cached_free = 0;
        for (&hash, &block) in &self.cache {
            if self.hashes[block as usize] != hash {
                return Err(format!("cache entry of device block {block} is stale"));
            }
            cached_free += usize::from(self.device.count(block) == 0);
        }
        if cached_free == self.num_cached_free {
            return Ok(());
        }
        Err(format!("{cached_free} free blocks are cached, {} counted", self.num_cached_free))
    }
}
