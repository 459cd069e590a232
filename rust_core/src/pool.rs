//! Reference counts of one pool of blocks, and its free blocks in the order in which they are handed out.

use crate::block_manager::BlockId;

/// No block: the end of the free list.
pub(crate) const NONE: BlockId = BlockId::MAX;

#[derive(Clone, Copy, Debug)]
struct Node {
    count: u32,
    /// Neighbours in the free list; without meaning while the block is in use.
    previous: BlockId,
    next: BlockId,
}

/// A pool. A block is in the free list iff its count is 0.
#[derive(Debug)]
pub(crate) struct Pool {
    nodes: Vec<Node>,
    first: BlockId,
    last: BlockId,
    num_free: usize,
}

impl Pool {
    /// A pool of free blocks.
    pub fn new(num_blocks: usize) -> Self {
        let nodes = vec![Node { count: 0, previous: NONE, next: NONE }; num_blocks];
        let mut pool = Self { nodes, first: NONE, last: NONE, num_free: 0 };
        (0..num_blocks as BlockId).for_each(|block| pool.push_back(block));
        pool
    }

    /// Blocks in all.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Blocks in the free list.
    pub fn num_free(&self) -> usize {
        self.num_free
    }

    /// Tables that hold a block.
    pub fn count(&self, block: BlockId) -> u32 {
        self.nodes[block as usize].count
    }

    /// Put a block whose count is 0 at the end of the free list.
    pub fn push_back(&mut self, block: BlockId) {
        self.link(self.last, block, NONE);
    }

    /// Put a block whose count is 0 at the beginning of the free list.
    pub fn push_front(&mut self, block: BlockId) {
        self.link(NONE, block, self.first);
    }

    fn link(&mut self, previous: BlockId, block: BlockId, next: BlockId) {
        let node = &mut self.nodes[block as usize];
        (node.previous, node.next) = (previous, next);
        self.join(previous, block);
        self.join(block, next);
        self.num_free += 1;
    }

    fn unlink(&mut self, block: BlockId) {
        let Node { previous, next, .. } = self.nodes[block as usize];
        self.join(previous, next);
        self.num_free -= 1;
    }

    /// Make two blocks neighbours; `NONE` stands for either end of the list.
    fn join(&mut self, previous: BlockId, next: BlockId) {
        match previous {
            NONE => self.first = next,
            previous => self.nodes[previous as usize].next = next,
        }
        match next {
            NONE => self.last = previous,
            next => self.nodes[next as usize].previous = previous,
        }
    }

    /// Hand out the next free block with count 1.
    pub fn pop(&mut self) -> Option<BlockId> {
        let block = self.first;
        if block == NONE {
            return None;
        }
        self.unlink(block);
        self.nodes[block as usize].count = 1;
        Some(block)
    }

    /// Take one more reference, out of the free list if it is the first.
    pub fn acquire(&mut self, block: BlockId) {
        if self.nodes[block as usize].count == 0 {
            self.unlink(block);
        }
        self.nodes[block as usize].count += 1;
    }

    /// Give one reference back; true if it was the last (the caller puts the block into the free list).
    pub fn drop_one(&mut self, block: BlockId) -> bool {
        let count = &mut self.nodes[block as usize].count;
        debug_assert!(*count > 0, "block {block} released twice");
        *count -= 1;
        *count == 0
    }

    /// Check counts and free list against the blocks of all live tables.
    pub fn check<'a>(&self, name: &str, tables: impl Iterator<Item = &'a [BlockId]>) -> Result<(), String> {
        let mut held = vec![0; self.len()];
        tables.flatten().for_each(|&block| held[block as usize] += 1);
        for (block, (node, held)) in self.nodes.iter().zip(&held).enumerate() {
            if node.count != *held {
                return Err(format!("{name} block {block} is in {held} tables, its count is {}", node.count));
            }
        }
        let mut free = 0;
        let mut block = self.first;
        while block != NONE {
            let node = &self.nodes[block as usize];
            if node.count != 0 {
                return Err(format!("{name} block {block} is free and in use"));
            }
            free += 1;
            block = node.next;
        }
        let unused = held.iter().filter(|&&held| held == 0).count();
        if free == unused && free == self.num_free {
            return Ok(());
        }
        Err(format!("{name} pool: {free} blocks in the free list, {unused} unused, {} counted", self.num_free))
    }
}
