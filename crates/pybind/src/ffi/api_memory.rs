//! Pictures and recordings in the table of functions: `include/rallocator.h` says what each function does.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::Arc;

use alloc_core::allocator::Tracked;
use alloc_core::history::{Action, HistoryEvent, LabelId, Recording, StackId};
use alloc_core::id::{DeviceId, PoolId};
use alloc_core::size::SizeClass;
use alloc_core::snapshot::{BlockPicture, PictureState, SegmentPicture};

use super::api_table::{Status, status};
use super::{device_pointer, raw_address};
use crate::recording::{self, Call, StackSource};
use crate::{hooks, process};

/// `rallocator_block`.
#[repr(C)]
pub(super) struct Block {
    address: *mut c_void,
    size: u64,
    requested: u64,
    state: u32,
    stack: u32,
}

/// `rallocator_segment`.
#[repr(C)]
pub(super) struct Segment {
    device: i32,
    stack: u32,
    address: *mut c_void,
    size: u64,
    stream: *mut c_void,
    pool_first: u64,
    pool_second: u64,
    is_large: bool,
    is_expandable: bool,
    block_count: usize,
    blocks: *const Block,
}

/// `rallocator_event`.
#[repr(C)]
pub(super) struct Event {
    device: i32,
    action: u32,
    address: u64,
    size: u64,
    stream: *mut c_void,
    pool_first: u64,
    pool_second: u64,
    time_us: i64,
    stack: u32,
    label: *const c_char,
    compile_context: *const c_char,
}

/// `rallocator_memory_visitor`.
#[repr(C)]
pub(super) struct MemoryVisitor {
    context: *mut c_void,
    segment: Option<unsafe extern "C" fn(*mut c_void, *const Segment)>,
    event: Option<unsafe extern "C" fn(*mut c_void, *const Event)>,
}

/// `rallocator_recording`.
#[repr(C)]
pub(super) struct RecordingOptions {
    limit: u64,
    skipped_actions: u32,
    events_have_stacks: bool,
    takes_on_free: bool,
    take_stack: Option<unsafe extern "C" fn() -> u32>,
    stack_noted: Option<unsafe extern "C" fn(u32)>,
}

/// Called for memory that comes and goes.
pub(super) type TrackerCallback = unsafe extern "C" fn(*mut c_void, *const Event);

/// Receives the number of a stack: `rallocator_stack_visitor`.
pub(super) type StackVisitor = unsafe extern "C" fn(*mut c_void, u32);

pub(super) unsafe extern "C" fn visit_memory(first: u64, second: u64, visitor: *const MemoryVisitor) {
    let Some(backend) = process::for_notice() else { return };
    let pool = PoolId(first, second);
    // SAFETY: the header asks for a visitor that may be read.
    let visitor = unsafe { &*visitor };
    // As in torch, a recording notes that a picture was taken, but not that somebody added up figures.
    let pictures = backend.pictures(visitor.event.is_some());
    if let Some(visit) = visitor.segment {
        let segments = pictures.iter().flat_map(|picture| &picture.segments);
        for picture in segments.filter(|segment| pool == PoolId::DEFAULT || segment.pool == pool) {
            let blocks: Vec<Block> = picture.blocks.iter().map(Block::from).collect();
            let segment = segment_of(picture, &blocks);
            // SAFETY: the header asks for a function that takes the visitor's context.
            unsafe { visit(visitor.context, &raw const segment) };
        }
    }
    if let Some(visit) = visitor.event {
        let mut said = HashMap::new();
        for picture in &pictures {
            for event in &picture.events {
                let event = event_of(picture.device, event, &mut said);
                // SAFETY: the header asks for a function that takes the visitor's context.
                unsafe { visit(visitor.context, &raw const event) };
            }
        }
    }
}

pub(super) unsafe extern "C" fn find_block(address: *mut c_void, block: *mut Block) -> bool {
    let found = |address| process::for_notice().and_then(|backend| backend.block_at(address));
    let Some(picture) = device_pointer(address).and_then(found) else { return false };
    // SAFETY: the header asks for a place that may be written.
    unsafe { block.write(Block::from(&picture)) };
    true
}

pub(super) extern "C" fn device_of(address: *mut c_void) -> i32 {
    let found = |address| process::for_notice().and_then(|backend| backend.device_of(address));
    device_pointer(address).and_then(found).map_or(-1, |device| device.0.cast_signed())
}

impl From<&BlockPicture> for Block {
    fn from(block: &BlockPicture) -> Self {
        Self {
            address: raw_address(Some(block.address)),
            size: block.size,
            requested: block.requested,
            state: match block.state {
                PictureState::Allocated => 0,
                PictureState::PendingFree => 1,
                PictureState::Inactive => 2,
            },
            stack: number_of(block.stack),
        }
    }
}

fn segment_of(segment: &SegmentPicture, blocks: &[Block]) -> Segment {
    Segment {
        device: index_of(segment.device),
        stack: number_of(segment.stack),
        address: raw_address(Some(segment.address)),
        size: segment.size,
        stream: segment.stream.0 as *mut c_void,
        pool_first: segment.pool.0,
        pool_second: segment.pool.1,
        is_large: segment.class == SizeClass::Large,
        is_expandable: segment.is_expandable,
        block_count: blocks.len(),
        blocks: blocks.as_ptr(),
    }
}

/// The event as C sees it. `said` keeps the texts that it points to.
fn event_of(device: DeviceId, event: &HistoryEvent, said: &mut HashMap<u32, (CString, CString)>) -> Event {
    let LabelId(label) = event.moment.label;
    let (label, compile_context) = said.entry(label).or_insert_with(|| {
        let words = recording::words(event.moment.label);
        (c_text(&words.label), c_text(&words.compile_context))
    });
    let &HistoryEvent { action, address, size, stream, pool, .. } = event;
    Event {
        time_us: i64::try_from(event.moment.time_us).unwrap_or(i64::MAX),
        stack: number_of(event.moment.stack),
        label: label.as_ptr(),
        compile_context: compile_context.as_ptr(),
        ..Event::from(&Tracked { action, device, address, size, stream, pool })
    }
}

/// With no time, and nothing said of it.
impl From<&Tracked> for Event {
    fn from(tracked: &Tracked) -> Self {
        Self {
            device: index_of(tracked.device),
            action: number_of_action(tracked.action),
            address: tracked.address.0,
            size: tracked.size,
            stream: tracked.stream.0 as *mut c_void,
            pool_first: tracked.pool.0,
            pool_second: tracked.pool.1,
            time_us: 0,
            stack: 0,
            label: c"".as_ptr(),
            compile_context: c"".as_ptr(),
        }
    }
}

/// The header numbers the actions in the order of this list.
fn number_of_action(action: Action) -> u32 {
    Action::ALL.iter().position(|other| *other == action).unwrap_or_default() as u32
}

/// A tracker that the caller passed as a function and its context.
struct CallbackTracker {
    told: TrackerCallback,
    context: *mut c_void,
}

// SAFETY: the header says that it is called by whichever thread allocates.
unsafe impl Send for CallbackTracker {}
// SAFETY: as above, also from several at once.
unsafe impl Sync for CallbackTracker {}

impl CallbackTracker {
    fn tell(&self, tracked: &Tracked) {
        let event = Event::from(tracked);
        // SAFETY: the header asks for a function that takes this context.
        unsafe { (self.told)(self.context, &raw const event) };
    }
}

pub(super) unsafe extern "C" fn add_tracker(told: TrackerCallback, context: *mut c_void) -> Status {
    let tracker = CallbackTracker { told, context };
    status(hooks::add_tracker(Arc::new(move |event| tracker.tell(event))))
}

/// The program's own keeper of stacks.
struct CallbackSource {
    take: unsafe extern "C" fn() -> u32,
    noted: Option<unsafe extern "C" fn(u32)>,
}

impl StackSource for CallbackSource {
    fn take(&self) -> StackId {
        // SAFETY: the header asks for a function that may be called from any thread.
        StackId(unsafe { (self.take)() })
    }

    fn noted(&self, stack: StackId) {
        if let Some(noted) = self.noted {
            // SAFETY: the header asks for a function that may be called from any thread.
            unsafe { noted(stack.0) };
        }
    }
}

pub(super) unsafe extern "C" fn record_history(options: *const RecordingOptions, forget: bool) -> Status {
    // SAFETY: the header asks for options that may be read, or null.
    let Some(options) = (unsafe { options.as_ref() }) else {
        return status(recording::record(None, 0, None, forget).map_err(Into::into));
    };
    let is_skipped = |(index, _): &(usize, &Action)| options.skipped_actions & 1 << index != 0;
    let skipped = Action::ALL.iter().enumerate().filter(is_skipped).map(|(_, action)| *action).collect();
    let limit = usize::try_from(options.limit).unwrap_or(usize::MAX);
    let events_have_stacks = options.events_have_stacks;
    let recording = Recording { skipped, events_have_stacks, ..recording::recording(limit) };
    let source = options.take_stack.map(|take| CallbackSource { take, noted: options.stack_noted });
    let takes = match &source {
        None => 0,
        Some(_) if options.takes_on_free => Call::Free as u8,
        Some(_) => Call::Malloc as u8,
    };
    let source = source.map(|source| Arc::new(source) as Arc<dyn StackSource>);
    status(recording::record(Some(&recording), takes, source, forget).map_err(Into::into))
}

pub(super) extern "C" fn is_recording() -> bool {
    recording::is_recording()
}

pub(super) unsafe extern "C" fn visit_stacks(visit: StackVisitor, context: *mut c_void) {
    let stacks = process::for_notice().map(crate::backend::Backend::stacks).unwrap_or_default();
    for stack in stacks.into_iter().filter_map(recording::foreign) {
        // SAFETY: the header asks for a function that takes this context.
        unsafe { visit(context, stack) };
    }
}

pub(super) extern "C" fn stack_of(address: *mut c_void) -> u32 {
    let of = |address| process::for_notice().map(|backend| number_of(backend.stack_of(address)));
    device_pointer(address).and_then(of).unwrap_or_default()
}

pub(super) unsafe extern "C" fn annotate(address: *mut c_void, text: *const c_char) {
    // SAFETY: the header asks for a text that ends with a 0 and may be read.
    let text = unsafe { CStr::from_ptr(text) };
    if let Some(address) = device_pointer(address) {
        recording::annotate(address, &text.to_string_lossy());
    }
}

pub(super) unsafe extern "C" fn set_label(text: *const c_char) {
    // SAFETY: the header asks for a text that ends with a 0 and may be read.
    recording::set_label(&unsafe { CStr::from_ptr(text) }.to_string_lossy());
}

pub(super) extern "C" fn label() -> *const c_char {
    thread_local!(static TEXT: RefCell<CString> = RefCell::default());
    let keep = |text: &RefCell<CString>| {
        text.replace(c_text(&recording::label()));
        text.borrow().as_ptr()
    };
    TEXT.try_with(keep).unwrap_or(c"".as_ptr())
}

pub(super) unsafe extern "C" fn set_compile_context(text: *const c_char) {
    // SAFETY: the header asks for a text that ends with a 0 and may be read.
    recording::set_compile_context(&unsafe { CStr::from_ptr(text) }.to_string_lossy());
}

/// The number that the program's own keeper knows a stack by; 0 for none and for Python's.
fn number_of(stack: StackId) -> u32 {
    recording::foreign(stack).unwrap_or(0)
}

fn index_of(device: DeviceId) -> i32 {
    i32::try_from(device.0).unwrap_or(i32::MAX)
}

fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "")).unwrap_or_default()
}
