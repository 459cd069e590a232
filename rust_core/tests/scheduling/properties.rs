//! The block manager against a naive model of it: same blocks, in the same order, after any history.

use std::collections::HashMap;

use proptest::prelude::*;
use pyvllm_core::block_manager::{BlockHash, BlockId, BlockManager, BlockTable};

/// What the block manager should be, without any cleverness.
#[derive(Default)]
struct Model {
    counts: Vec<u32>,
    /// Next to be handed out first.
    free: Vec<BlockId>,
    hashes: HashMap<BlockId, BlockHash>,
    host_counts: Vec<u32>,
    host_free: Vec<BlockId>,
}

#[derive(Clone, Default)]
struct Line {
    blocks: Vec<BlockId>,
    on_host: bool,
    /// Hash of each block's tokens and those before; a model of what the sequence says.
    tokens: Vec<u32>,
}

impl Model {
    fn new(blocks: u32, host_blocks: u32) -> Self {
        Self {
            counts: vec![0; blocks as usize],
            free: (0..blocks).collect(),
            host_counts: vec![0; host_blocks as usize],
            host_free: (0..host_blocks).collect(),
            ..Self::default()
        }
    }

    fn allocate(&mut self) -> BlockId {
        let block = self.free.remove(0);
        self.hashes.remove(&block);
        self.counts[block as usize] = 1;
        block
    }

    fn acquire(&mut self, block: BlockId) {
        self.free.retain(|&free| free != block);
        self.counts[block as usize] += 1;
    }

    /// Blocks that can be found go to the end of the list, the others to its beginning.
    fn free(&mut self, block: BlockId) {
        self.counts[block as usize] -= 1;
        if self.counts[block as usize] == 0 {
            let at = if self.hashes.contains_key(&block) { self.free.len() } else { 0 };
            self.free.insert(at, block);
        }
    }

    fn free_host(&mut self, block: BlockId) {
        self.host_counts[block as usize] -= 1;
        if self.host_counts[block as usize] == 0 {
            self.host_free.push(block);
        }
    }

    fn holder(&self, hash: BlockHash) -> Option<BlockId> {
        self.hashes.iter().find(|(_, known)| **known == hash).map(|(&block, _)| block)
    }
}

#[derive(Clone, Debug)]
enum Action {
    Grow { line: usize, by: usize },
    Fork { line: usize },
    Write { line: usize },
    Release { line: usize },
    Publish { line: usize },
    Adopt { tokens: Vec<u32> },
    Swap { line: usize, with: usize },
    Clear,
}

fn action() -> impl Strategy<Value = Action> {
    let line = 0..6_usize;
    prop_oneof![
        4 => (line.clone(), 1..4_usize).prop_map(|(line, by)| Action::Grow { line, by }),
        2 => line.clone().prop_map(|line| Action::Fork { line }),
        3 => line.clone().prop_map(|line| Action::Write { line }),
        3 => line.clone().prop_map(|line| Action::Release { line }),
        4 => line.clone().prop_map(|line| Action::Publish { line }),
        3 => prop::collection::vec(0..2_u32, 1..5).prop_map(|tokens| Action::Adopt { tokens }),
        2 => (line.clone(), line).prop_map(|(line, with)| Action::Swap { line, with }),
        1 => Just(Action::Clear),
    ]
}

struct Both {
    manager: BlockManager,
    model: Model,
    tables: Vec<BlockTable>,
    lines: Vec<Line>,
    next_token: u32,
}

impl Both {
    fn hashes(&self, tokens: &[u32]) -> Vec<BlockHash> {
        let mut hash = self.manager.root_hash("", 0);
        let chain = tokens.iter().map(|&token| {
            hash = self.manager.chain_hash(hash, &[token]);
            hash
        });
        chain.collect()
    }

    fn apply(&mut self, action: &Action) {
        match *action {
            Action::Grow { line, by } => self.grow(line, by),
            Action::Fork { line } => self.fork(line),
            Action::Write { line } => self.write(line),
            Action::Release { line } => self.release(line),
            Action::Publish { line } => self.publish(line),
            Action::Adopt { ref tokens } => self.adopt(tokens),
            Action::Swap { line, with } => self.swap(line, with),
            Action::Clear => {
                self.manager.clear_cache();
                self.model.hashes.clear();
            }
        }
    }

    fn grow(&mut self, line: usize, by: usize) {
        if line >= self.lines.len() {
            self.lines.push(Line::default());
            self.tables.push(BlockTable::default());
        }
        let line = line.min(self.lines.len() - 1);
        if self.lines[line].on_host || self.manager.num_free() < by {
            return;
        }
        let target = self.lines[line].blocks.len() + by;
        self.manager.grow(&mut self.tables[line], target);
        for _ in 0..by {
            let block = self.model.allocate();
            self.lines[line].blocks.push(block);
            // Few tokens, so that prefixes repeat.
            self.next_token = (self.next_token * 5 + 3) % 7;
            self.lines[line].tokens.push(self.next_token % 2);
        }
    }

    fn fork(&mut self, line: usize) {
        if line >= self.lines.len() || self.lines.len() >= 6 {
            return;
        }
        self.tables.push(self.manager.fork(&self.tables[line]));
        let copy = self.lines[line].clone();
        for &block in &copy.blocks {
            if copy.on_host {
                self.model.host_counts[block as usize] += 1;
            } else {
                self.model.acquire(block);
            }
        }
        self.lines.push(copy);
    }

    /// Copy on write of the last block.
    fn write(&mut self, line: usize) {
        if line >= self.lines.len() || self.lines[line].on_host || self.lines[line].blocks.is_empty() {
            return;
        }
        if self.manager.num_free() == 0 {
            return;
        }
        let index = self.lines[line].blocks.len() - 1;
        let mut copies = Vec::new();
        self.manager.make_writable(&mut self.tables[line], index, &mut copies);
        let source = self.lines[line].blocks[index];
        if self.model.counts[source as usize] > 1 {
            let copy = self.model.allocate();
            self.model.free(source);
            self.lines[line].blocks[index] = copy;
            assert_eq!(copies, [[source as i32, copy as i32]]);
        } else {
            assert!(copies.is_empty());
        }
    }

    fn release(&mut self, line: usize) {
        if line >= self.lines.len() {
            return;
        }
        self.manager.release(self.tables.remove(line));
        let Line { blocks, on_host, .. } = self.lines.remove(line);
        for &block in blocks.iter().rev() {
            if on_host { self.model.free_host(block) } else { self.model.free(block) }
        }
    }

    fn publish(&mut self, line: usize) {
        if line >= self.lines.len() || self.lines[line].on_host {
            return;
        }
        for (index, hash) in self.hashes(&self.lines[line].tokens).into_iter().enumerate() {
            self.manager.publish(&self.tables[line], index, hash);
            let block = self.lines[line].blocks[index];
            if self.model.holder(hash).is_none() {
                self.model.hashes.entry(block).or_insert(hash);
            }
        }
    }

    fn adopt(&mut self, tokens: &[u32]) {
        let hashes = self.hashes(tokens);
        let found: Vec<BlockId> = hashes.iter().map_while(|&hash| self.model.holder(hash)).collect();
        let free = found.iter().filter(|&&block| self.model.counts[block as usize] == 0).count();
        assert_eq!(self.manager.match_prefix(&hashes), (found.len(), free));
        if self.lines.len() >= 6 {
            return;
        }
        let mut table = BlockTable::default();
        self.manager.adopt(&mut table, &hashes[..found.len()]);
        found.iter().for_each(|&block| self.model.acquire(block));
        self.tables.push(table);
        self.lines.push(Line { tokens: tokens[..found.len()].to_vec(), blocks: found, on_host: false });
    }

    /// Swap two lines together, out or back in.
    fn swap(&mut self, line: usize, with: usize) {
        let (low, high) = (line.min(with), line.max(with));
        if high >= self.lines.len() || self.lines[low].on_host != self.lines[high].on_host {
            return;
        }
        let places = if low == high { vec![low] } else { vec![low, high] };
        let on_host = self.lines[low].on_host;
        let mut distinct: Vec<BlockId> = places.iter().flat_map(|&place| self.lines[place].blocks.clone()).collect();
        distinct.sort_unstable();
        distinct.dedup();
        let mut moves = Vec::new();
        let room = if on_host { self.manager.num_free() } else { self.manager.num_free_host() };
        let mut tables: Vec<&mut BlockTable> =
            self.tables.iter_mut().enumerate().filter(|(i, _)| places.contains(i)).map(|(_, table)| table).collect();
        if on_host {
            if distinct.len() > room {
                return;
            }
            self.manager.swap_in(&mut tables, &mut moves);
        } else {
            assert_eq!(self.manager.swap_out(&mut tables, &mut moves), distinct.len() <= room);
            if distinct.len() > room {
                assert!(moves.is_empty());
                return;
            }
        }
        assert_eq!(moves.len(), distinct.len());
        self.move_lines(&places, on_host);
    }

    fn move_lines(&mut self, places: &[usize], on_host: bool) {
        let mut moved: HashMap<BlockId, BlockId> = HashMap::new();
        for &place in places {
            let left = std::mem::take(&mut self.lines[place].blocks);
            for &block in &left {
                let known = moved.get(&block).copied();
                let to = match (known, on_host) {
                    (Some(known), true) => {
                        self.model.counts[known as usize] += 1;
                        known
                    }
                    (Some(known), false) => {
                        self.model.host_counts[known as usize] += 1;
                        known
                    }
                    (None, true) => self.model.allocate(),
                    (None, false) => {
                        let host = self.model.host_free.remove(0);
                        self.model.host_counts[host as usize] = 1;
                        host
                    }
                };
                moved.insert(block, to);
                self.lines[place].blocks.push(to);
                if on_host {
                    self.model.free_host(block);
                }
            }
            if !on_host {
                left.iter().rev().for_each(|&block| self.model.free(block));
            }
            self.lines[place].on_host = !on_host;
        }
    }

    fn compare(&self) {
        for (table, line) in self.tables.iter().zip(&self.lines) {
            assert_eq!((table.blocks(), table.is_on_host()), (&line.blocks[..], line.on_host));
        }
        let manager = &self.manager;
        assert_eq!((manager.num_free(), manager.num_free_host()), (self.model.free.len(), self.model.host_free.len()));
        let counts: Vec<u32> = (0..self.model.counts.len() as u32).map(|block| manager.ref_count(block)).collect();
        assert_eq!(counts, self.model.counts);
        let cached = self.model.free.iter().filter(|block| self.model.hashes.contains_key(block)).count();
        assert_eq!(manager.num_cached_free(), cached);
        manager.check(&self.tables.iter().collect::<Vec<_>>()).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn the_block_manager_is_its_model(
        blocks in 1..12_u32,
        host_blocks in 0..6_u32,
        actions in prop::collection::vec(action(), 1..60),
    ) {
        let mut both = Both {
            manager: BlockManager::new(blocks as usize, host_blocks as usize, 1, true),
            model: Model::new(blocks, host_blocks),
            tables: Vec::new(),
            lines: Vec::new(),
            next_token: 1,
        };
        for action in &actions {
            both.apply(action);
            both.compare();
        }
        while !both.lines.is_empty() {
            both.release(0);
        }
        both.compare();
        prop_assert_eq!(both.manager.num_free(), blocks as usize);
    }
}
