//! Cascades: sequences of a step whose block tables begin with the same blocks, so that attention may read those once
//! for all of them.

/// Fewest sequences of a cascade.
const MIN_SEQS: usize = 4;

/// Finds cascades. Keeps its memory from step to step.
#[derive(Debug, Default)]
pub struct CascadeFinder {
    /// By block: (search, set of the sequences that begin with it).
    heads: Vec<(u32, u32)>,
    search: u32,
    /// Members of each set.
    sets: Vec<Vec<u32>>,
}

/// Where a plan says which cascades there are; `seqs` and `blocks` have one word for each sequence, `offsets` one more.
pub struct CascadeSections<'a> {
    /// Members, cascade after cascade.
    pub seqs: &'a mut [i32],
    /// CSR offsets into `seqs`; those of cascades that do not exist are the last one's end.
    pub offsets: &'a mut [i32],
    /// Blocks that the members of each cascade share; 0 for those that do not exist.
    pub blocks: &'a mut [i32],
}

impl CascadeFinder {
    /// Write the cascades among the first `num_seqs` sequences to `sections`, and return how many there are.
    ///
    /// `offsets` and `ids` are the plan's block tables, of device blocks below `num_blocks`. None are written unless
    /// reading shared blocks once saves at least `min_saved` blocks.
    pub fn find(
        &mut self,
        offsets: &[i32],
        ids: &[i32],
        num_seqs: usize,
        min_saved: usize,
        sections: CascadeSections<'_>,
    ) -> usize {
        let CascadeSections { seqs, offsets: starts, blocks } = sections;
        for section in [&mut *seqs, &mut *starts, &mut *blocks] {
            section.fill(0);
        }
        let table = |seq: u32| &ids[offsets[seq as usize] as usize..offsets[seq as usize + 1] as usize];
        let set_count = self.group_by_first_block(num_seqs as u32, table);
        let (mut found, mut end, mut saved) = (0, 0, 0);
        for members in self.sets[..set_count].iter().filter(|members| members.len() >= MIN_SEQS) {
            let first = table(members[0]);
            let shared = members[1..].iter().fold(first.len(), |shared, &seq| {
                first[..shared].iter().zip(table(seq)).take_while(|(a, b)| a == b).count()
            });
            for (target, &seq) in seqs[end..].iter_mut().zip(members) {
                *target = seq as i32;
            }
            end += members.len();
            saved += shared * (members.len() - 1);
            blocks[found] = shared as i32;
            found += 1;
            starts[found] = end as i32;
        }
        if saved < min_saved.max(1) {
            for section in [seqs, starts, blocks] {
                section.fill(0);
            }
            return 0;
        }
        starts[found..].fill(end as i32);
        found
    }

    /// Fill `sets`, and return how many it has.
    fn group_by_first_block<'a>(&mut self, num_seqs: u32, table: impl Fn(u32) -> &'a [i32]) -> usize {
        self.search = self.search.wrapping_add(1);
        let mut set_count = 0;
        for seq in 0..num_seqs {
            let Some(&first) = table(seq).first() else { continue };
            if self.heads.len() <= first as usize {
                self.heads.resize(first as usize + 1, (0, 0));
            }
            let head = &mut self.heads[first as usize];
            if head.0 != self.search {
                *head = (self.search, set_count as u32);
                if set_count == self.sets.len() {
                    self.sets.push(Vec::new());
                }
                self.sets[set_count].clear();
                set_count += 1;
            }
            self.sets[head.1 as usize].push(seq);
        }
        set_count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (members, shared blocks) of each cascade.
    fn cascades(tables: &[&[i32]], min_saved: usize) -> Vec<(Vec<i32>, i32)> {
        let mut offsets = vec![0];
        offsets.extend(tables.iter().scan(0, |end, table| {
            *end += table.len() as i32;
            Some(*end)
        }));
        let n = tables.len();
        let (mut seqs, mut starts, mut blocks) = (vec![-1; n], vec![-1; n + 1], vec![-1; n]);
        let mut finder = CascadeFinder::default();
        let mut found = 0;
        for _ in 0..2 {
            let sections = CascadeSections { seqs: &mut seqs, offsets: &mut starts, blocks: &mut blocks };
            found = finder.find(&offsets, &tables.concat(), n, min_saved, sections);
        }
        assert!(blocks[found..].iter().all(|&count| count == 0));
        assert!(starts[found..].iter().all(|&start| start == starts[found]));
        (0..found).map(|i| (seqs[starts[i] as usize..starts[i + 1] as usize].to_vec(), blocks[i])).collect()
    }

    #[test]
    fn sequences_that_begin_alike_are_a_cascade_as_far_as_all_of_them_agree() {
        let tables: [&[i32]; 9] =
            [&[5, 6, 7, 1], &[9, 2], &[5, 6, 7, 3], &[5, 6, 8], &[9, 4], &[5, 6, 7], &[9, 10], &[11], &[9, 12, 13]];
        assert_eq!(cascades(&tables, 1), [(vec![0, 2, 3, 5], 2), (vec![1, 4, 6, 8], 1)]);
    }

    #[test]
    fn few_sequences_or_little_gain_are_no_cascade() {
        let tables: [&[i32]; 4] = [&[5, 6, 1], &[5, 6, 2], &[5, 6, 3], &[5, 6]];
        assert_eq!(cascades(&tables, 6), [(vec![0, 1, 2, 3], 2)]);
        assert_eq!(cascades(&tables, 7), []);
        assert_eq!(cascades(&tables[..3], 1), []);
        assert_eq!(cascades(&[&[], &[], &[], &[]], 1), []);
    }
}
