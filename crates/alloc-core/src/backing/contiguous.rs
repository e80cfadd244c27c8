//! Growing by one handle at a time, none touching another, so that every block lies in one handle.

use crate::{
    backing::moving::Growth,
    device::{DeviceState, Request},
    plan::{Hole, Map, Plan, Source},
    size::{SMALL_SEGMENT, SizeClass},
};

impl DeviceState {
    /// One handle that holds the request, at the lowest address that has room for it and for a hole on either side:
    /// idle blocks of two handles never touch, and so are never united.
    pub(super) fn plan_single(&mut self, request: &Request, growth: Growth) -> Option<Plan> {
        let size = match self.pools[request.pool].class {
            SizeClass::Small => self.whole_granules(SMALL_SEGMENT),
            SizeClass::Large => self.whole_granules(request.rounded),
        };
        if !self.may_grow(request, size, growth) {
            return None;
        }
        let apart = self.capabilities.granularity_bytes;
        let mut holes = self.pools[request.pool].unmapped.values().copied();
        let Some(hole) = holes.find(|hole| self.blocks[*hole].size >= size + 2 * apart) else {
            return self.plan_reserve(request, apart);
        };
        let block = self.cut_hole(hole, self.blocks[hole].size - apart);
        self.claim_unmapped(block, size);
        let holes = vec![Hole { block, address: self.blocks[block].address, sources: vec![Source::New(size)] }];
        let stream = self.streams.target(self.pools[request.pool].stream);
        let (device, access) = (self.id, self.access.clone());
        Some(Plan::Map(Map {
            device,
            stream,
            waits: Vec::new(),
            pieces: vec![block],
            holes,
            returns: Vec::new(),
            access,
        }))
    }
}
