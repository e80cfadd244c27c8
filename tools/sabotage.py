"""Plants faults in the core, one by one, and demands that the tests catch each.

A test suite that no fault can fail proves nothing. Each fault below is a change that compiles and that somebody could
make: the text it replaces has to stand in its file exactly once, so a fault that no longer applies is noticed. Faults
are planted in a copy of the workspace under target/sabotage; the checkout is not touched.

    python tools/sabotage.py                 plant all
    python tools/sabotage.py NAME…           plant some
    python tools/sabotage.py --check         name them, and say which no longer apply
    python tools/sabotage.py --programs      let the generated programs alone catch them, without the scenarios
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = Path("crates/alloc-core/src")
WORK = ROOT / "target" / "sabotage"
# Programs that a fault has to be caught by, if no scenario does.
PROGRAMS = 3_000
# What the tests beside the code are called; only what nothing else catches needs them.
UNIT_TESTS = "unit tests"
# A fault may make the core wait for ever; that is caught too.
SECONDS_MAX = 240


@dataclass(frozen=True)
class Fault:
    """One change for the worse."""

    name: str
    """What is done wrong."""
    file: str
    """Below the core's sources."""
    old: str
    """The right text, which stands there once."""
    new: str
    """The wrong one."""

    def places(self, root: Path) -> int:
        """How often the right text stands in its file."""
        return (root / CORE / self.file).read_text(encoding="utf-8").count(self.old)

    def plant(self, root: Path) -> str:
        """Puts the wrong text in, and returns the file's right content."""
        path = root / CORE / self.file
        right = path.read_text(encoding="utf-8")
        path.write_text(right.replace(self.old, self.new), encoding="utf-8")
        return right


FAULTS = (
    Fault(
        "skip the last-use check before an unmap",
        "release.rs",
        "if !is_over || pieces.0.is_empty() {",
        "if (!is_over && false) || pieces.0.is_empty() {",
    ),
    Fault(
        "forget one stream that used a block",
        "device.rs",
        "for (stream, _) in block.last_use.iter() {",
        "for (stream, _) in block.last_use.iter().skip(1) {",
    ),
    Fault(
        "take a recorded event for a reached one",
        "event.rs",
        "epoch <= self.state(stream).done\n",
        "epoch <= self.state(stream).recorded\n",
    ),
    Fault(
        "drop a merge with the block before",
        "block_table.rs",
        "block.previous.filter(|previous| self[*previous].state == block.state)?;",
        "block.previous.filter(|_| false)?;",
    ),
    Fault(
        "lose the last use of a merged block",
        "block_table.rs",
        "block.last_use.unite(&absorbed.last_use);",
        "",
    ),
    Fault(
        "lose the last use of a split block's rest",
        "block_table.rs",
        "rest.last_use.clone_from(&front.last_use);",
        "rest.last_use.clear();",
    ),
    Fault(
        "lose an event whose record fails",
        "execute.rs",
        "None => *spare.insert(driver.create_event(target.device)?),",
        "None => driver.create_event(target.device)?,",
    ),
    Fault(
        "return a released graph pool at once",
        "pool_set.rs",
        "self.private(owner).state == PrivateState::Proven",
        "!matches!(self.private(owner).state, PrivateState::Live { .. })",
    ),
    Fault(
        "return oversize memory of a live graph",
        "release.rs",
        "!self.has_ranges() && self.may_go_back(request.pool)",
        "!self.has_ranges()",
    ),
    Fault(
        "record on a stream that is capturing",
        "execute.rs",
        "Ok(CaptureStatus::Active | CaptureStatus::Invalidated) => return Ok(Closed::Capturing),",
        "Ok(CaptureStatus::Active | CaptureStatus::Invalidated) => {}",
    ),
    Fault(
        "record on the calling thread's own stream in place of another thread's",
        "execute.rs",
        "target.thread == 0 || target.thread == thread_number()",
        "target.thread == 0 || thread_number() != 0",
    ),
    Fault(
        "forget a use on a stream that the driver does not name",
        "allocator/streams.rs",
        "if !state.record_stream(address, unnamed) {",
        "if state.blocks.at(address.0).is_none() {",
    ),
    Fault(
        "make calls that a capture forbids",
        "execute.rs",
        "plan => match driver.exchange_capture_mode(CaptureMode::Relaxed) {",
        "plan => match driver.exchange_capture_mode(CaptureMode::Global) {",
    ),
    Fault(
        "synchronise beside a capture that has asked for nothing",
        "allocator.rs",
        "are_known &= !state.pools.has_silent_route();",
        "are_known &= true;",
    ),
    Fault(
        "lose the handles of a growth that fails",
        "execute.rs",
        "!is_stuck(*handle) && driver.release_handle(map.device, *handle).is_err()",
        "!is_stuck(*handle) && false",
    ),
    Fault(
        "hand out memory that was never made accessible",
        "release.rs",
        "RunOutcome::Kept if run.is_stuck => self.stuck.push(run),",
        "RunOutcome::Kept if run.is_stuck && false => self.stuck.push(run),",
    ),
    Fault(
        "forget to count a handle that was released late",
        "release.rs",
        "self.stats.on_handles_released(stray.class, stray.size, 1);",
        "",
    ),
    Fault(
        "hand out a block that is pending on a second stream",
        "device.rs",
        "BlockState::Pending { streams } | BlockState::Deferred { streams } => *streams -= 1,",
        "BlockState::Pending { .. } | BlockState::Deferred { .. } => self.make_idle(id),",
    ),
    Fault(
        "keep the rest of a block instead of splitting it off",
        "device.rs",
        "if pool.is_worth_splitting(request.rounded, rest, self.config.max_split_size) {",
        "if false {",
    ),
    Fault(
        "take a failed query for the end of the work",
        "execute.rs",
        "first_error.get_or_insert(error);\n                    break;",
        "first_error.get_or_insert(error);\n                    reached.push(*mark);",
    ),
    Fault(
        "take a failed wait for a wait",
        "settle.rs",
        "if result.is_ok() {\n            self.commit_done(answers);",
        "{\n            self.commit_done(answers);",
    ),
    Fault(
        "take a new stream for the destroyed one of its handle",
        "event.rs",
        "state.key == key && !state.retired",
        "state.key == key",
    ),
    Fault(
        "record a default stream of the memory's own device only",
        "allocator/streams.rs",
        "Ok(current) => current.into_iter().collect(),",
        "Ok(_) => Vec::new(),",
    ),
    Fault(
        "hand memory on without the wait on the GPU",
        "execute.rs",
        "marks.iter().try_for_each(|mark| driver.wait_event(stream, mark.event))",
        "Ok(())",
    ),
    Fault(
        "make a stream that is capturing wait",
        "execute.rs",
        "if driver.capture_status(stream)? != CaptureStatus::None {",
        "if driver.capture_status(stream)? != CaptureStatus::None && false {",
    ),
    Fault(
        "unmap a stale mapping that is in use",
        "stale.rs",
        "if !self.is_over(id) {",
        "if false {",
    ),
    Fault(
        "release a handle that is mapped at a stale address",
        "stale.rs",
        "self.copies.contains_key(&handle)",
        "self.copies.contains_key(&handle) && false",
    ),
    Fault(
        "fill addresses at which a stale mapping stands",
        "backing/gap.rs",
        "within.map(|(_, stale)| stale.block).collect()",
        "within.take(0).map(|(_, stale)| stale.block).collect()",
    ),
    Fault(
        "let one handle come back to two places",
        "backing/gap.rs",
        "!kept.contains(&address) && self.coming.insert(address)",
        "!kept.contains(&address) && (self.coming.insert(address) || true)",
    ),
    Fault(
        "forget where a handle stands that could not come back",
        "backing/paged.rs",
        "self.make_stale(*block, donor.mapping.handle);",
        "self.make_unmapped(*block);",
    ),
    Fault(
        "leave a remainder at the end of a range",
        "backing/paged.rs",
        "round_up(round_up(total + total / 8, RANGE_GRANULARITY), handle_unit)",
        "round_up(total + total / 8, RANGE_GRANULARITY)",
    ),
    Fault(
        "keep emptied ranges where addresses have run out",
        "ladder.rs",
        "ladder.refusal == Some(Refusal::Addresses) && !release.runs.is_empty()",
        "ladder.refusal == Some(Refusal::Addresses) && release.is_empty()",
    ),
    Fault(
        "return emptied ranges where addresses are left",
        "ladder.rs",
        "ladder.refusal == Some(Refusal::Addresses) && !release.runs.is_empty()",
        "!release.runs.is_empty()",
    ),
    Fault(
        "forget a stream beside a broken device",
        "allocator/streams.rs",
        "missing = RecordOutcome::Broken;\n                continue;",
        "missing = RecordOutcome::Broken;\n                break;",
    ),
    Fault(
        "lend a block before its last use is over",
        "guest.rs",
        "let undone = uses.filter(|(stream, epoch)| *stream != own && !self.streams.is_done(*stream, *epoch));",
        "let undone = uses.filter(|_| false);",
    ),
    Fault(
        "lend memory of a live graph",
        "guest.rs",
        "lender.owner == own.owner && (own.owner.is_none() || lender.stream == own.stream)",
        "lender.owner == own.owner || lender.stream != own.stream",
    ),
    Fault(
        "let a guest go home before its stream is done",
        "device.rs",
        "if stream != own && !self.streams.is_over(stream) {",
        "if stream != own && block.guest_of.is_none() && !self.streams.is_over(stream) {",
    ),
    Fault(
        "forget that a guest's home stream uses it too",
        "device.rs",
        "if block.guest_of.is_some() || self.pools[block.pool].stream != stream {",
        "if self.pools[block.pool].stream != stream {",
    ),
    Fault(
        "move where a little growth serves",
        "ladder.rs",
        "self.plan_move(request, Lenders::Nobody, Growth::WithinNeed, findings)",
        "self.plan_move(request, Lenders::Ordered, Growth::WithinNeed, findings)",
    ),
    Fault(
        "take new memory for all where another stream left too little",
        "ladder.rs",
        "self.plan_move(request, Lenders::AfterWait, Growth::ToLimit, findings)",
        "self.plan_move(request, Lenders::AfterWait, Growth::None, findings)",
    ),
    Fault(
        "wait for another stream whatever it spares",
        "backing/moving.rs",
        "after_wait.new_bytes == 0 || without_wait()",
        "after_wait.new_bytes < request.rounded || without_wait()",
    ),
    Fault(
        "wait for streams that ask for no memory",
        "backing/moving.rs",
        "CrossStreamReuse::Owned => self.pools.has_pool_of(stream)",
        "CrossStreamReuse::Owned => true",
    ),
    Fault(
        "count what is pending as needed",
        "backing/moving.rs",
        "allocated.peak.max(allocated.current + request.rounded)",
        "allocated.peak.max(self.stats.active_bytes.all.current + request.rounded)",
    ),
    Fault(
        "cut free blocks at the wrong end",
        "cut.rs",
        "mappings.are_whole(start, from_end) && !mappings.are_whole(start + size, block.end())",
        "!mappings.are_whole(start, from_end) || mappings.are_whole(start + size, block.end())",
    ),
    Fault(
        "cut the best fit whatever that pins",
        "cut.rs",
        "if pool.keeps_handles_whole() && pool.terms.may_split && self.may_lend(request.pool) {",
        "if pool.keeps_handles_whole() && !pool.terms.may_split {",
    ),
    Fault(
        "give up the best fit where handles do not move",
        "cut.rs",
        " && self.may_lend(request.pool) {",
        " {",
    ),
    Fault(
        "cut an oversize block for an ordinary request, since that pins less",
        "cut.rs",
        " && !self.is_spared(*block, request)",
        "",
    ),
    Fault(
        "spare a handle that is used in part already",
        "cut.rs",
        "block.address <= handle.address && handle.end() <= block.end()",
        "handle.end() <= block.end()",
    ),
    Fault(
        "begin every request where its block begins",
        "cut.rs",
        "if boundary <= from_end {",
        "if boundary < block.address {",
    ),
    Fault(
        "forget what is left before a cut",
        "cut.rs",
        "index.insert(FreeBlock { size, ..whole });",
        "",
    ),
    Fault(
        "take large handles however much lies idle",
        "backing/moving.rs",
        "if self.is_much_idle() { size / 2 } else { size }",
        "if self.is_much_idle() { size } else { size }",
    ),
    Fault(
        "move memory although that is off",
        "backing/moving.rs",
        "|| self.is_tracked || self.moving_of(request.pool) != Move::On {",
        "|| self.is_tracked || self.moving_of(request.pool) == Move::Contiguous {",
    ),
    Fault(
        "put a block of a contiguous pool together",
        "backing/moving.rs",
        "if self.moving_of(request.pool) == Move::Contiguous {",
        "if self.config.moving == Move::Contiguous {",
    ),
    Fault(
        "restrict a pool while a request for it may be getting memory",
        "pool_set.rs",
        "private.reserved.all.current > 0 || private.pools.iter().any(|pool| self[*pool].climbers > 0)",
        "private.reserved.all.current > 0",
    ),
    Fault(
        "let a weaker word lift what was said of a pool",
        "pool_set.rs",
        "self.change_terms(private, |terms| terms.moving = moving.max(terms.moving));",
        "self.change_terms(private, |terms| terms.moving = moving);",
    ),
    Fault(
        "say something of a pool's later streams alone",
        "pool_set.rs",
        "            self[pool].terms = terms.clone();\n",
        "            let _ = (pool, &terms);\n",
    ),
    Fault(
        "move a handle out of a pool whose memory stays where it is",
        "backing/moving.rs",
        "self.pools.is_releasable(pool) && self.moving_of(pool) == Move::On",
        "self.pools.is_releasable(pool)",
    ),
    Fault(
        "serve what must stay where it is from a pool that moves",
        "ladder.rs",
        "pools.retain(|pool| self.moving_of(request.pool) <= self.moving_of(*pool));",
        "",
    ),
    Fault(
        "unite blocks of two handles where memory is contiguous",
        "backing/contiguous.rs",
        "let apart = self.capabilities.granularity_bytes;",
        "let apart = 0;",
    ),
    Fault(
        "map new memory out of a late device's reach",
        "allocator/devices.rs",
        "device.fast()?.access.push(newcomer);",
        "",
    ),
    Fault(
        "restore a pool over memory that another stream still uses",
        "checkpoint.rs",
        "block.last_use.iter().all(|(stream, _)| self.streams.is_over(stream))",
        "true",
    ),
    Fault(
        "serve one stream from what a pool offers to another",
        "pool_set.rs",
        "self[*pool].stream == stream && self[*pool].class == class).collect()",
        "self[*pool].class == class).collect()",
    ),
    Fault(
        "cut a block that is to be handed out whole",
        "pool_set.rs",
        "if !self.terms.may_split {",
        "if false {",
    ),
    Fault(
        "give back what others have cached along with a pool's memory",
        "release.rs",
        "self.pool_id(*pool) == id && self.may_go_back(*pool);",
        "self.may_go_back(*pool);",
    ),
    Fault(
        "move memory that a tracker knows of",
        "backing/moving.rs",
        "|| self.is_tracked || self.moving_of(request.pool) != Move::On {",
        "|| self.moving_of(request.pool) != Move::On {",
    ),
    Fault(
        "forget to tell a tracker of what was not given back",
        "allocator/tracking.rs",
        "let kept = released.segments.iter().filter(|(_, is_freed)| !is_freed);",
        "let kept = released.segments.iter().filter(|_| false);",
    ),
    Fault(
        "leave an import that failed where it is",
        "allocator/sharing.rs",
        "let undone = if mapped > 0 { self.driver.unmap(device, base, mapped) } else { Ok(()) };",
        "let undone: Result<(), DriverError> = Err(error);",
    ),
    Fault(
        "let a stream wait for the block that it handed on last",
        "takeover.rs",
        "is_some_and(|newest| epoch < *newest)",
        "is_some_and(|newest| epoch <= *newest)",
    ),
    Fault(
        "forget what a stream needs to work ahead of others",
        "backing/moving.rs",
        "is_needed(held + self.ahead_bytes(request))",
        "is_needed(held)",
    ),
    Fault(
        "obtain large handles near the limit",
        "backing/moving.rs",
        ".min(room / HANDLES_PER_ROOM)",
        ".min(room.max(HANDLES_PER_ROOM))",
    ),
    Fault(
        "ask a full device for the same memory again and again",
        "backing/moving.rs",
        "self.refused.is_none_or(|refused| reserved < refused) && self",
        "self.refused.is_none_or(|refused| reserved < refused || true) && self",
    ),
    Fault(
        "take a call that fails otherwise for a device that is full",
        "backing/paged.rs",
        "failure.error.is_out_of_memory() && failure.error.call == Call::CreateHandle",
        "failure.error.is_out_of_memory()",
    ),
    Fault(
        "forget below the limit what is reserved",
        "backing/moving.rs",
        "most.saturating_sub(self.stats.reserved_bytes.all.current)",
        "most.saturating_sub(self.stats.active_bytes.all.peak)",
    ),
    Fault(
        "give a segment back to its source while it is in use",
        "backing/sourced.rs",
        "if block.is_split() || !is_over ||",
        "if block.is_split() || (!is_over && false) ||",
    ),
    Fault(
        "give a segment back to its source while its pool lives",
        "backing/sourced.rs",
        "&& self.pools.is_releasable(*pool)",
        "&& (self.pools.is_releasable(*pool) || true)",
    ),
    Fault(
        "give the driver what a source gave",
        "release.rs",
        "!self.is_sourced(pool) && self",
        "self",
    ),
    Fault(
        "take away from a source what it gave twice",
        "backing/sourced.rs",
        "if gives_twice { None }",
        "if gives_twice && false { None }",
    ),
    Fault(
        "forget what sources are being asked for",
        "backing/segments.rs",
        "saturating_add(self.promised)",
        "saturating_add(0)",
    ),
    Fault(
        "serve who asked for memory of a source with any",
        "ladder.rs",
        "if self.is_sourced(request.pool) {\n            return None;",
        "if self.is_sourced(request.pool) && false {\n            return None;",
    ),
    Fault(
        "lose count of a segment that is on its way back to its source",
        "backing/sourced.rs",
        "self.departing.push((pool, size));",
        "self.departing.push((pool, size + 512));",
    ),
    Fault(
        "forget that a thread panicked under the fast lock",
        "sync.rs",
        "            self.raw.is_poisoned = true;\n",
        "",
    ),
    Fault(
        "take a panic elsewhere for one under the fast lock",
        "sync.rs",
        "thread::panicking() && !self.was_panicking",
        "thread::panicking()",
    ),
)


def copy_workspace(to: Path) -> None:
    """Makes the copy what the checkout is, and touches only what differs: cargo goes by the times of files."""
    copied = [
        ROOT / "Cargo.toml",
        ROOT / "Cargo.lock",
        *(path for path in (ROOT / "crates").rglob("*") if path.is_file()),
    ]
    targets = {to / path.relative_to(ROOT): path for path in copied}
    for stale in {path for path in to.rglob("*") if path.is_file()} - targets.keys():
        stale.unlink()
    for target, path in targets.items():
        content = path.read_bytes()
        if not target.is_file() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def cargo(workspace: Path, *arguments: str) -> tuple[int, str]:
    """Runs `cargo test` on the copy. Returns its exit status and what it wrote; a timeout is a failure."""
    environment = {
        **os.environ,
        "CARGO_TARGET_DIR": str(WORK / "target"),
        "CARGO_PROFILE_DEV_DEBUG": "0",
        "RALLOCATOR_PROGRAMS": str(PROGRAMS),
        # That a program fails is enough here: nobody reads it.
        "RALLOCATOR_SHRINKS": "0",
        "RUST_BACKTRACE": "0",
        "RUSTFLAGS": "-Awarnings",
    }
    command = ["cargo", "test", "--locked", "-p", "alloc-core", "--features", "sim", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=workspace,
            env=environment,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_MAX,
        )
    except subprocess.TimeoutExpired:
        return 124, "test which ... FAILED, for want of an end"
    return done.returncode, done.stdout


def failing_tests(output: str) -> list[str]:
    """The names of the tests that failed."""
    return re.findall(r"^test (\S+)(?: - should panic)? \.\.\. FAILED", output, re.MULTILINE)


def verdict(workspace: Path, suites: list[str]) -> tuple[bool, str]:
    """Whether the planted fault is caught, and by what."""
    for suite in suites:
        target = ("--lib",) if suite == UNIT_TESTS else ("--test", suite)
        status, output = cargo(workspace, *target, "--no-run")
        if status != 0:
            return False, "DOES NOT COMPILE\n" + output
        status, output = cargo(workspace, *target)
        if status != 0:
            names = failing_tests(output)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            return True, f"{suite}: {names[0] if names else 'the process died'}{more}"
    return False, "SURVIVES"


def main() -> int:
    """Plants the faults and says what caught each."""
    parser = argparse.ArgumentParser(description="Plant faults in the core: the tests must catch each.")
    parser.add_argument("names", nargs="*", help="the faults to plant; all if none is named")
    parser.add_argument("--check", action="store_true", help="name the faults, and say which no longer apply")
    parser.add_argument("--programs", action="store_true", help="only the generated programs may catch them")
    options = parser.parse_args()
    unknown = set(options.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    faults = [fault for fault in FAULTS if not options.names or fault.name in options.names]
    suites = ["programs"] if options.programs else ["scenarios", "programs", UNIT_TESTS]

    lost = [fault for fault in faults if fault.places(ROOT) != 1]
    for fault in lost:
        print(f"{fault.name}: its text stands {fault.places(ROOT)} times in {fault.file}, not once", file=sys.stderr)
    if options.check:
        print("\n".join(fault.name for fault in faults))
    if options.check or lost:
        return 1 if lost else 0

    workspace = WORK / "workspace"
    workspace.mkdir(parents=True, exist_ok=True)
    copy_workspace(workspace)
    is_caught, by = verdict(workspace, suites)
    if is_caught or by != "SURVIVES":
        print(f"without any fault the tests fail already: {by}", file=sys.stderr)
        return 1

    survivors = 0
    for fault in faults:
        start = time.monotonic()
        right = fault.plant(workspace)
        try:
            is_caught, by = verdict(workspace, suites)
        finally:
            (workspace / CORE / fault.file).write_text(right, encoding="utf-8")
        survivors += not is_caught
        print(f"{fault.name:<58} {time.monotonic() - start:4.0f} s  {by}", flush=True)
    print(f"{len(faults) - survivors} of {len(faults)} faults caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
