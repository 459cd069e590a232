//! Requests and their grammars: compiled while the request waits, handed to its sequence, and what happens if one fails.

use std::sync::Arc;

use crate::error::Error;
use crate::guided::StructuredOutputs;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Have a request's grammar made, if it has one; until then it waits.
    pub(crate) fn compile_grammar(&mut self, slot: u32) {
        if let Some(group) = self.groups[slot as usize].as_deref()
            && let Some(compiler) = &mut self.compiler
            && let Some(wanted) = &group.request.params.structured_outputs
        {
            compiler.submit((slot, group.request.arrival), wanted.clone());
        }
    }

    /// Hand out grammars that are ready; requests whose grammar cannot be had fail.
    pub(crate) fn take_grammars(&mut self) {
        let Some(compiler) = &mut self.compiler else { return };
        for ((slot, arrival), compiled) in compiler.take() {
            let group = self.groups[slot as usize].as_deref_mut();
            let Some(group) = group.filter(|group| group.request.arrival == arrival) else { continue };
            match compiled {
                Ok(grammar) => {
                    group.compiling = false;
                    group.sequences[0].history.grammar = Some(Box::new(grammar));
                }
                Err(why) => {
                    let request_id = Arc::clone(&group.request.request_id);
                    self.fail_grammar(&request_id, &why);
                }
            }
        }
    }

    /// End a request whose grammar cannot be compiled, or followed any further.
    pub(crate) fn fail_grammar(&mut self, request_id: &str, why: &str) {
        let group = self.by_id.get(request_id).and_then(|&slot| self.groups[slot as usize].as_ref());
        let wanted = group.and_then(|group| group.request.params.structured_outputs.as_ref());
        let field = wanted.map_or("", StructuredOutputs::field);
        let message = format!("structured_outputs.{field} cannot be used: {why}");
        self.fail(request_id, Error::parameter("structured_outputs", message));
    }
}
