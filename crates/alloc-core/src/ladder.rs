//! What is tried when no free block fits, in which order.
//!
//! Before every rung the pool is searched again, since any rung, and any other thread, may have freed what is needed.
//! The order of the policies `native` and `expandable` is torch's (`malloc` in
//! [CUDACachingAllocator.cpp](https://github.com/pytorch/pytorch/blob/v2.11.0/c10/cuda/CUDACachingAllocator.cpp)), with
//! three differences: events are asked about here and not in every malloc; after the wait the pool is searched before the
//! driver is asked for anything; the user's callback comes last, since it may throw away what took long to make.

use std::mem;

use crate::{
    backing::moving::{Findings, Growth, Lenders},
    config::Policy,
    device::{DeviceState, Request},
    driver::{Call, DriverError},
    error::AllocError,
    id::{DevicePtr, PoolId},
    plan::{Departure, ObtainError, Outcome, Plan},
};

/// One thing to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rung {
    /// Give an event to every stream that blocks wait for.
    ClosePending,
    /// Ask the oldest events of every stream.
    Poll,
    /// Unmap the oldest addresses whose memory has moved away, if there are too many.
    UnmapSurplus,
    /// Return segments that went unused long, if a threshold is set and passed.
    Collect,
    /// Obtain new memory, as long as hardly more is reserved than the program is known to need at once.
    GrowWithinNeed,
    /// Hand a pending block on where there are several: the asking stream waits on the GPU for those that used it.
    TakeOverEarly,
    /// Move idle handles.
    Move,
    /// Move idle handles, and obtain new memory for the rest, on the same condition.
    MoveAndGrow,
    /// Hand a pending block on: the asking stream waits on the GPU for those that used it.
    TakeOver,
    /// Move idle handles of other streams too, for which the asking stream waits on the GPU. If they are a good part of
    /// the request and not all of it, obtain new memory for the rest.
    MoveAfterWait,
    /// Obtain new memory.
    Grow,
    /// Take an idle block of another pool, where it lies.
    Borrow,
    /// Return segments that must not be split.
    ReleaseOversize,
    /// Obtain new memory after that.
    GrowAfterOversize,
    /// Give an event to every stream, also for the last uses of idle memory.
    CloseAll,
    /// Wait on the host for every event.
    Wait,
    /// Wait for the device, so that released private pools can go back.
    Synchronize,
    /// Unmap all addresses whose memory has moved away.
    UnmapStale,
    /// Return cached segments to the sources of released private pools.
    HandBack,
    /// Return all cached memory of the driver; where addresses have run out, then the ranges too that this empties.
    ReleaseCached,
    /// Obtain new memory after that.
    GrowLast,
    /// Let the user free something, and start once more from the first rung.
    CallBack,
}

impl Rung {
    /// Every rung there is.
    pub const ALL: [Self; 22] = [
        Self::ClosePending,
        Self::Poll,
        Self::UnmapSurplus,
        Self::Collect,
        Self::GrowWithinNeed,
        Self::TakeOverEarly,
        Self::Move,
        Self::MoveAndGrow,
        Self::TakeOver,
        Self::MoveAfterWait,
        Self::Grow,
        Self::Borrow,
        Self::ReleaseOversize,
        Self::GrowAfterOversize,
        Self::CloseAll,
        Self::Wait,
        Self::Synchronize,
        Self::UnmapStale,
        Self::HandBack,
        Self::ReleaseCached,
        Self::GrowLast,
        Self::CallBack,
    ];

    /// The order of torch's two policies.
    const TORCH: &[Self] = &[
        Self::ClosePending,
        Self::Poll,
        Self::Collect,
        Self::Grow,
        Self::ReleaseOversize,
        Self::GrowAfterOversize,
        Self::CloseAll,
        Self::Wait,
        Self::Synchronize,
        Self::HandBack,
        Self::ReleaseCached,
        Self::GrowLast,
        Self::CallBack,
    ];

    /// Our own order: but for a little growth, memory that is there comes before memory that is not, and the GPU waits
    /// before the host does.
    const RALLOCATOR: &[Self] = &[
        Self::ClosePending,
        Self::Poll,
        Self::UnmapSurplus,
        // With a little room to spare, blocks that come and go in order do so where they were, and nothing has to move.
        Self::GrowWithinNeed,
        // Waiting for what was used before the last takes the GPU little time, and the host less than moving.
        Self::TakeOverEarly,
        Self::Move,
        Self::MoveAndGrow,
        Self::TakeOver,
        Self::CloseAll,
        // Where all work is over, the new events say so at once, and nobody has to wait.
        Self::Poll,
        Self::MoveAfterWait,
        Self::Grow,
        Self::Borrow,
        Self::Wait,
        Self::Move,
        Self::Borrow,
        Self::Synchronize,
        Self::UnmapStale,
        Self::HandBack,
        Self::ReleaseCached,
        Self::GrowLast,
        Self::Borrow,
        Self::CallBack,
    ];

    /// The rungs that give cached memory back: what `empty_cache` does. The second release returns the ranges that the
    /// first one emptied.
    pub(crate) const EMPTY_CACHE: [Self; 7] = [
        Self::CloseAll,
        Self::Wait,
        Self::Synchronize,
        Self::UnmapStale,
        Self::HandBack,
        Self::ReleaseCached,
        Self::ReleaseCached,
    ];

    fn order(rules: Policy) -> &'static [Self] {
        match rules {
            Policy::Native | Policy::Expandable => Self::TORCH,
            Policy::Rallocator => Self::RALLOCATOR,
        }
    }
}

/// How far the search for one request has come.
#[derive(Debug)]
pub(crate) struct Ladder {
    pub(crate) request: Request,
    next: usize,
    attempt: Attempt,
    /// Whether the last rung's plan was for addresses, or emptied ranges whose addresses are wanted. That is no memory yet:
    /// the same rung goes on when it is done.
    is_making_room: bool,
    pub(crate) refusal: Option<Refusal>,
    /// The last rung below growth that failed: if nothing serves the request, this and no lack of memory is why.
    failure: Option<AllocError>,
    /// What a source gave and cannot be used, if it is to have it back, under no lock.
    pub(crate) unusable: Option<Departure>,
}

/// Which attempt at a request is under way. Each is made once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    /// The one that has not come to the last growth yet.
    First,
    /// The one with what was given back for it: what torch counts as a retry.
    Retry,
    /// The last one, since the user's callback has run.
    CalledBack,
}

/// Why there is nothing for a request, if not because the device is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The source of this private pool gave nothing. Such a pool has no ranges, so never both.
    Source(PoolId),
    /// The driver had no addresses for the last range that it was asked for.
    Addresses,
}

impl Ladder {
    pub(crate) fn new(request: Request) -> Self {
        Self {
            request,
            next: 0,
            attempt: Attempt::First,
            is_making_room: false,
            refusal: None,
            failure: None,
            unusable: None,
        }
    }

    /// Takes the last rung once more, if it has made room for what it is for.
    fn go_on(&mut self) {
        if mem::take(&mut self.is_making_room) {
            self.next -= 1;
        }
    }
}

/// What to do next for a request.
#[derive(Debug)]
pub(crate) enum Step {
    /// The request is served.
    Done(DevicePtr),
    /// Carry this out, commit the outcome, and climb on.
    Run(Rung, Plan),
    /// Nothing is left to try. With an error, a call other than for new memory failed on the way.
    Fail(Option<AllocError>),
}

impl DeviceState {
    /// The next step for the ladder's request.
    pub(crate) fn climb(&mut self, ladder: &mut Ladder) -> Step {
        self.leave_released_pool(ladder);
        if let Some(address) = self.malloc(&ladder.request) {
            return Step::Done(address);
        }
        let findings = Findings::default();
        while let Some(rung) = Rung::order(self.rules).get(ladder.next).copied() {
            ladder.next += 1;
            if rung == Rung::GrowLast && ladder.attempt == Attempt::First {
                ladder.attempt = Attempt::Retry;
                self.stats.num_alloc_retries += 1;
            }
            if rung == Rung::CallBack && ladder.attempt == Attempt::CalledBack {
                continue;
            }
            if matches!(rung, Rung::Wait | Rung::Synchronize) && self.is_beyond_reach(&ladder.request) {
                continue;
            }
            let Some(plan) = self.plan_for(rung, &ladder.request, &findings) else { continue };
            ladder.is_making_room = match &plan {
                Plan::Reserve(_) => true,
                // Ranges stay for their pools to grow in again, but not if a request fails for them.
                Plan::Release(release) => ladder.refusal == Some(Refusal::Addresses) && !release.runs.is_empty(),
                Plan::Unmap(_) => !matches!(rung, Rung::UnmapSurplus | Rung::UnmapStale),
                _ => false,
            };
            self.stats.rungs[rung as usize] += 1;
            return Step::Run(rung, plan);
        }
        match self.malloc_from_last_resort(&ladder.request) {
            Some(address) => Step::Done(address),
            None => Step::Fail(ladder.failure.clone()),
        }
    }

    /// Serves a request that nothing else could from a private pool that the program offered for that. The block belongs
    /// to that pool, and returns to it. Who asked for memory of a source is served with nothing else, and who asked for
    /// memory that stays where it is with no other.
    fn malloc_from_last_resort(&mut self, request: &Request) -> Option<DevicePtr> {
        if self.is_sourced(request.pool) {
            return None;
        }
        let (stream, class) = (self.pools[request.pool].stream, self.pools[request.pool].class);
        let mut pools = self.pools.last_resorts(stream, class);
        pools.retain(|pool| self.moving_of(request.pool) <= self.moving_of(*pool));
        pools.into_iter().find_map(|pool| self.malloc(&Request { pool, ..*request }))
    }

    /// Whether the request would fail if nothing but what the program holds were reserved: then no wait helps.
    fn is_beyond_reach(&self, request: &Request) -> bool {
        let held = self.stats.allocated_bytes.all.current;
        let most = self.limit.min(self.capabilities.total_bytes);
        self.rules == Policy::Rallocator && held.saturating_add(request.rounded) > most
    }

    /// A private pool that was released meanwhile hands nothing out any more: the default pool serves the request.
    fn leave_released_pool(&mut self, ladder: &mut Ladder) {
        let pool = ladder.request.pool;
        if !self.pools.is_live(pool) {
            let (stream, class) = (self.pools[pool].stream, self.pools[pool].class);
            self.leave(ladder);
            ladder.refusal = None;
            ladder.request.pool = self.pools.of(None, stream, class);
            self.pools[ladder.request.pool].climbers += 1;
        }
    }

    /// The request needs its pool no longer.
    pub(crate) fn leave(&mut self, ladder: &Ladder) {
        self.pools[ladder.request.pool].climbers -= 1;
        self.pools.drop_empty_privates();
    }

    /// What `rung` asks of the driver for this request, if it applies. If not, all that `findings` are about is as before.
    fn plan_for(&mut self, rung: Rung, request: &Request, findings: &Findings) -> Option<Plan> {
        match rung {
            // A pool with a source of its own follows the rules of torch's segments, whatever the others do.
            Rung::GrowWithinNeed | Rung::Move | Rung::MoveAndGrow | Rung::MoveAfterWait | Rung::Borrow
                if self.is_sourced(request.pool) =>
            {
                None
            }
            Rung::ClosePending => self.plan_close_pending(),
            Rung::Poll => self.plan_poll(),
            Rung::UnmapSurplus => self.plan_unmap_surplus(),
            Rung::Collect => self.plan_collect(),
            Rung::GrowWithinNeed => self.plan_move(request, Lenders::Nobody, Growth::WithinNeed, findings),
            Rung::Move => self.plan_move(request, Lenders::Ordered, Growth::None, findings),
            Rung::MoveAndGrow => self.plan_move(request, Lenders::Ordered, Growth::WithinNeed, findings),
            Rung::TakeOverEarly => self.plan_take_over_early(request),
            Rung::TakeOver => self.plan_take_over(request),
            Rung::MoveAfterWait => self.plan_move(request, Lenders::AfterWait, Growth::ToLimit, findings),
            Rung::Grow | Rung::GrowLast => self.plan_growth(request, findings),
            Rung::Borrow => self.plan_borrow(request),
            Rung::ReleaseOversize => self.plan_release_oversize(request),
            Rung::GrowAfterOversize => self.config.max_split_size.and_then(|_| self.plan_growth(request, findings)),
            Rung::CloseAll => self.plan_close_all(),
            Rung::Wait => self.plan_wait_for_all(),
            Rung::UnmapStale => self.plan_unmap_stale(),
            Rung::Synchronize => self.plan_synchronize(),
            Rung::HandBack => self.plan_hand_back(None),
            Rung::ReleaseCached => self.plan_release_all(false),
            Rung::CallBack => Some(Plan::CallBack),
        }
    }

    /// The wait for all pending work, which torch counts whether or not there is any.
    fn plan_wait_for_all(&mut self) -> Option<Plan> {
        self.stats.num_sync_all_streams += 1;
        self.plan_wait()
    }

    fn plan_growth(&mut self, request: &Request, findings: &Findings) -> Option<Plan> {
        match self.pools[request.pool].terms.rules {
            Policy::Native => self.plan_obtain(request),
            Policy::Expandable => self.plan_map(request),
            Policy::Rallocator => self.plan_move(request, Lenders::Ordered, Growth::ToLimit, findings),
        }
    }

    /// What one of the rungs of [`Rung::EMPTY_CACHE`] asks of the driver, for all memory or for that of a released
    /// private pool.
    pub(crate) fn plan_empty(&mut self, rung: Rung, only: Option<PoolId>) -> Option<Plan> {
        match rung {
            Rung::CloseAll => self.plan_close_all(),
            Rung::Wait => self.plan_wait_for_all(),
            Rung::UnmapStale => self.plan_unmap_stale(),
            Rung::Synchronize => self.plan_synchronize(),
            Rung::HandBack => self.plan_hand_back(only),
            Rung::ReleaseCached => match only {
                None => self.plan_release_all(true),
                Some(pool) => self.plan_release_of(pool),
            },
            _ => unreachable!("emptying the cache neither grows nor asks the user"),
        }
    }

    /// Takes note of an outcome on behalf of a request. Returns the address if the request is served now, and the
    /// failure if the driver refused new memory for another reason than having none.
    pub(crate) fn commit_for(
        &mut self,
        outcome: Outcome,
        ladder: &mut Ladder,
    ) -> Result<Option<DevicePtr>, AllocError> {
        // A wait on the GPU that fails, or that a capture forbids, is no failure either: a later rung needs none.
        let is_of_wait = |error: DriverError| matches!(error.call, Call::WaitEvent | Call::CaptureStatus);
        let is_no_failure = |error: DriverError| error.is_out_of_memory() || is_of_wait(error);
        let refused = |error: DriverError| if is_no_failure(error) { Ok(None) } else { Err(error.into()) };
        match outcome {
            Outcome::Obtained(obtain, result) => {
                self.keep_promise(&obtain);
                match result {
                    Ok(address) => match self.commit_obtain(&obtain, address, &ladder.request) {
                        Ok(address) => Ok(Some(address)),
                        Err(error) => {
                            ladder.unusable = self.rejected(obtain, address);
                            Err(error.into())
                        }
                    },
                    Err(ObtainError::OutOfMemory) => {
                        ladder.refusal = Some(Refusal::Source(obtain.user.pool));
                        Ok(None)
                    }
                    Err(ObtainError::Driver(error)) => refused(error),
                    Err(ObtainError::Source(error)) => Err(error.into()),
                }
            }
            Outcome::Reserved(_, Err(error)) => {
                ladder.refusal = error.is_out_of_memory().then_some(Refusal::Addresses);
                refused(error)
            }
            Outcome::Reserved(reserve, Ok(base)) => {
                ladder.refusal = None;
                self.commit_reserve(&reserve, base);
                ladder.go_on();
                Ok(None)
            }
            Outcome::Mapped(map, Ok(handles)) => Ok(Some(self.commit_map(&map, handles, &ladder.request))),
            Outcome::Mapped(map, Err(failure)) => {
                self.commit_map_failed(&map, &failure);
                refused(failure.error)
            }
            Outcome::TookOver(taken, Ok(())) => Ok(Some(self.commit_take_over(&taken, &ladder.request))),
            Outcome::TookOver(taken, Err(error)) => {
                self.commit_take_over_failed(&taken);
                refused(error)
            }
            Outcome::HandedBack(departures, error) => {
                // What a source keeps is still reserved, so that memory is out, and nothing else is to be said of it here.
                self.commit_hand_back(departures);
                ladder.failure = error.map(AllocError::from);
                Ok(None)
            }
            Outcome::CalledBack(has_freed) => {
                ladder.attempt = Attempt::CalledBack;
                if has_freed {
                    ladder.next = 0;
                }
                Ok(None)
            }
            other => {
                ladder.failure = self.commit(other).err();
                if ladder.failure.is_none() {
                    ladder.go_on();
                }
                Ok(None)
            }
        }
    }

    /// Takes note of an outcome that serves no request. The state is right again in any case; the error is reported.
    pub(crate) fn commit(&mut self, outcome: Outcome) -> Result<(), AllocError> {
        let fail = |error: Option<DriverError>| error.map_or(Ok(()), |error| Err(error.into()));
        match outcome {
            Outcome::Closed(closings, error) => {
                self.commit_close(closings);
                fail(error)
            }
            Outcome::Polled(marks, error) => {
                self.commit_done(&marks);
                fail(error)
            }
            Outcome::Waited(marks, result) => {
                self.commit_wait(&marks, result);
                Ok(result?)
            }
            Outcome::Synchronized(synchronize, result) => {
                if result? {
                    self.commit_synchronize(&synchronize);
                }
                Ok(())
            }
            Outcome::Unmapped(runs, error) => {
                self.commit_unmap(runs);
                fail(error)
            }
            Outcome::Released(released) => {
                let error = released.error;
                self.commit_release(released);
                fail(error)
            }
            Outcome::HandedBack(departures, error) => {
                let kept = departures.iter().find(|(_, result)| result.is_err());
                let failed = kept.map(|(departure, _)| departure.failure());
                self.commit_hand_back(departures);
                fail(error).and(failed.map_or(Ok(()), |failed| Err(failed.into())))
            }
            Outcome::Obtained(..)
            | Outcome::Reserved(..)
            | Outcome::Mapped(..)
            | Outcome::TookOver(..)
            | Outcome::CalledBack(_) => {
                unreachable!("memory is obtained for a request only")
            }
        }
    }
}
