//! The simulator's side of the seam: [`Driver`] as the allocator sees it.

use super::SimDriver;
use super::capture::Captures;
use super::event::Recorded;
use super::simulation::{Life, Simulation};
use crate::driver::{
    Call, Capabilities, CaptureMode, CaptureStatus, Completion, Driver, DriverError, MemoryInfo, Result, Status, Ticket,
};
use crate::id::{DeviceId, DevicePtr, Event, PhysicalHandle, Stream, StreamHandle};

impl SimDriver {
    /// One driver call that needs no context: counted, and failed if a test wants it to.
    fn call<T>(&self, call: Call, body: impl FnOnce(&mut Simulation) -> std::result::Result<T, Status>) -> Result<T> {
        let mut simulation = self.lock();
        simulation.ledger.on_call(call);
        let outcome = match simulation.life {
            Life::Forked => Err(Status::NotInitialized),
            Life::ShutDown => Err(Status::Deinitialized),
            Life::Running => match simulation.faults.on_call(call) {
                Some(status) => Err(status),
                None => body(&mut simulation),
            },
        };
        if outcome.is_err() {
            simulation.ledger.on_failure(call);
        }
        outcome.map_err(|status| DriverError { call, status })
    }

    /// One driver call in `device`'s context, which it makes if nobody has yet.
    fn call_on<T>(
        &self,
        call: Call,
        device: DeviceId,
        body: impl FnOnce(&mut Simulation) -> std::result::Result<T, Status>,
    ) -> Result<T> {
        self.call(call, |simulation| {
            let context = simulation.contexts.get_mut(device.index()).ok_or(Status::InvalidDevice)?;
            if context.is_lost {
                return Err(Status::IllegalAddress);
            }
            context.is_active = true;
            body(simulation)
        })
    }
}

fn require_device(simulation: &Simulation, device: DeviceId) -> std::result::Result<(), Status> {
    if device.index() < simulation.contexts.len() { Ok(()) } else { Err(Status::InvalidDevice) }
}

/// A captured event was touched: the call fails with `status`, and the capture the event belongs to is spoiled.
fn refuse_captured(captures: &mut Captures, recorded: &Recorded, status: Status) -> std::result::Result<(), Status> {
    match recorded {
        Recorded::Captured(capture) => {
            captures.spoil(*capture);
            Err(status)
        }
        Recorded::Never | Recorded::Mark(_) => Ok(()),
    }
}

impl Driver for SimDriver {
    fn device_count(&self) -> Result<u32> {
        self.call(Call::Initialize, |simulation| Ok(simulation.options.devices))
    }

    fn capabilities(&self, device: DeviceId) -> Result<Capabilities> {
        self.call(Call::Attribute, |simulation| {
            require_device(simulation, device)?;
            let options = &simulation.options;
            let (missing, granularity_bytes) = if options.virtual_memory {
                (String::new(), options.granularity_bytes)
            } else {
                ("the simulated device was made without virtual memory".to_owned(), 0)
            };
            Ok(Capabilities {
                total_bytes: options.capacity_bytes,
                virtual_memory: options.virtual_memory,
                virtual_memory_missing: missing,
                granularity_bytes,
                stale_mappings_max: options.stale_mappings_max,
            })
        })
    }

    fn current_device(&self) -> Result<Option<DeviceId>> {
        self.call(Call::CurrentContext, |simulation| Ok(simulation.thread().device))
    }

    fn is_active(&self, device: DeviceId) -> Result<bool> {
        self.call(Call::PrimaryContextState, |simulation| {
            require_device(simulation, device)?;
            Ok(simulation.contexts[device.index()].is_active)
        })
    }

    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> Result<bool> {
        self.call(Call::CanAccessPeer, |simulation| {
            require_device(simulation, device)?;
            require_device(simulation, peer)?;
            Ok(simulation.memory.is_reachable(device, peer))
        })
    }

    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        self.call_on(Call::MemoryInfo, device, |simulation| Ok(simulation.memory.info(device)))
    }

    fn allocate(&self, device: DeviceId, size: u64) -> Result<DevicePtr> {
        self.call_on(Call::Allocate, device, |simulation| {
            simulation.refuse_unsafe()?;
            let address = simulation.memory.allocate(device, size)?;
            simulation.ledger.on_bytes(Call::Allocate, size, 1);
            Ok(DevicePtr(address))
        })
    }

    fn free(&self, device: DeviceId, address: DevicePtr) -> Result<()> {
        self.call_on(Call::Free, device, |simulation| {
            simulation.refuse_unsafe()?;
            simulation.memory.segment_size(device, address.0)?;
            wait_for_device(simulation, device)?;
            free_segment(simulation, device, address)
        })
    }

    fn reserve_range(&self, device: DeviceId, size: u64) -> Result<DevicePtr> {
        self.call_on(Call::ReserveRange, device, |simulation| {
            simulation.memory.reserve_range(device, size).map(DevicePtr)
        })
    }

    fn free_range(&self, device: DeviceId, base: DevicePtr, size: u64) -> Result<()> {
        self.call_on(Call::FreeRange, device, |simulation| simulation.memory.free_range(device, base.0, size))
    }

    fn create_handle(&self, device: DeviceId, size: u64) -> Result<PhysicalHandle> {
        self.call_on(Call::CreateHandle, device, |simulation| simulation.memory.create_handle(device, size))
    }

    fn release_handle(&self, device: DeviceId, handle: PhysicalHandle) -> Result<()> {
        self.call_on(Call::ReleaseHandle, device, |simulation| {
            let size = simulation.memory.release_handle(device, handle)?;
            simulation.forget_gone();
            simulation.ledger.on_bytes(Call::ReleaseHandle, size, 1);
            Ok(())
        })
    }

    fn map(&self, device: DeviceId, address: DevicePtr, size: u64, handle: PhysicalHandle) -> Result<()> {
        self.call_on(Call::Map, device, |simulation| simulation.memory.map(device, address.0, size, handle))
    }

    fn set_access(&self, device: DeviceId, address: DevicePtr, size: u64, devices: &[DeviceId]) -> Result<()> {
        self.call_on(Call::SetAccess, device, |simulation| {
            let handles = simulation.memory.set_access(address.0, size, devices)?;
            simulation.ledger.on_bytes(Call::SetAccess, size, handles);
            Ok(())
        })
    }

    fn unmap(&self, device: DeviceId, address: DevicePtr, size: u64) -> Result<()> {
        self.call_on(Call::Unmap, device, |simulation| {
            let handles = simulation.memory.unmap(address.0, size)?;
            simulation.on_unmap(address.0, size);
            simulation.forget_gone();
            simulation.ledger.on_bytes(Call::Unmap, size, handles);
            Ok(())
        })
    }

    fn export_handle(&self, device: DeviceId, handle: PhysicalHandle) -> Result<i32> {
        self.call_on(Call::ExportHandle, device, |simulation| simulation.memory.export_handle(device, handle))
    }

    fn import_handle(&self, device: DeviceId, descriptor: i32) -> Result<PhysicalHandle> {
        self.call_on(Call::ImportHandle, device, |simulation| simulation.memory.import_handle(device, descriptor))
    }

    fn ticket(&self, device: DeviceId, base: DevicePtr) -> Result<Ticket> {
        self.call_on(Call::GetTicket, device, |simulation| {
            simulation.memory.segment_size(device, base.0)?;
            let mut ticket = [0; Ticket::BYTES];
            ticket[..8].copy_from_slice(&base.0.to_le_bytes());
            Ok(Ticket(ticket))
        })
    }

    fn open_ticket(&self, device: DeviceId, _ticket: &Ticket) -> Result<DevicePtr> {
        // All of a simulation is one process, in which no ticket of its own can be opened.
        self.call_on(Call::OpenTicket, device, |_| Err(Status::InvalidContext))
    }

    fn close_ticket(&self, device: DeviceId, _address: DevicePtr) -> Result<()> {
        self.call_on(Call::CloseTicket, device, |_| Err(Status::InvalidValue))
    }

    fn create_event(&self, device: DeviceId) -> Result<Event> {
        self.call_on(Call::CreateEvent, device, |simulation| Ok(simulation.events.create(device)))
    }

    fn destroy_event(&self, device: DeviceId, event: Event) -> Result<()> {
        self.call_on(Call::DestroyEvent, device, |simulation| simulation.events.destroy(device, event))
    }

    fn record_event(&self, event: Event, stream: Stream) -> Result<()> {
        self.call_on(Call::RecordEvent, stream.device, |simulation| {
            let index = simulation.live_stream(Call::RecordEvent, stream)?;
            simulation.events.of_device(stream.device, event)?;
            simulation.captures.active(index)?;
            let recorded = match simulation.captures.of(index) {
                Some(capture) => Recorded::Captured(capture),
                None => Recorded::Mark(simulation.timeline.mark(index)),
            };
            simulation.events.record(event, recorded);
            Ok(())
        })
    }

    fn query_event(&self, device: DeviceId, event: Event) -> Result<Completion> {
        self.call_on(Call::QueryEvent, device, |simulation| {
            simulation.refuse_unsafe()?;
            let recorded = simulation.events.of_device(device, event)?;
            refuse_captured(&mut simulation.captures, recorded, Status::CapturedEvent)?;
            match recorded {
                Recorded::Mark(mark) if !simulation.timeline.is_reached(mark) => Ok(Completion::Pending),
                Recorded::Mark(mark) => {
                    simulation.timeline.host.join(&mark.clock);
                    Ok(Completion::Done)
                }
                Recorded::Never | Recorded::Captured(_) => Ok(Completion::Done),
            }
        })
    }

    fn synchronize_event(&self, device: DeviceId, event: Event) -> Result<()> {
        self.call_on(Call::SynchronizeEvent, device, |simulation| {
            simulation.refuse_unsafe()?;
            let recorded = simulation.events.of_device(device, event)?;
            refuse_captured(&mut simulation.captures, recorded, Status::InvalidValue)?;
            if let Recorded::Mark(mark) = recorded.clone() {
                if !simulation.timeline.is_reached(&mark) {
                    simulation.host_wait(mark.ends_at_ns);
                }
                simulation.timeline.host.join(&mark.clock);
            }
            require_context(simulation, device)
        })
    }

    fn wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        self.call_on(Call::WaitEvent, stream.device, |simulation| {
            let index = simulation.live_stream(Call::WaitEvent, stream)?;
            let recorded = simulation.events.recorded(event)?.clone();
            simulation.captures.active(index)?;
            if let Some(capture) = simulation.captures.of(index) {
                simulation.captures.spoil(capture);
                return Err(Status::CaptureIsolation);
            }
            refuse_captured(&mut simulation.captures, &recorded, Status::CapturedEvent)?;
            if let Recorded::Mark(mark) = recorded {
                simulation.timeline.wait(index, &mark);
                if mark.stream != index {
                    let awaited = simulation.timeline.stream(mark.stream).stream;
                    simulation.awaited.insert(awaited);
                }
            }
            Ok(())
        })
    }

    fn stream_device(&self, handle: StreamHandle) -> Result<DeviceId> {
        self.call(Call::StreamContext, |simulation| {
            let device = simulation.current_device();
            let index = simulation.live_handle(Call::StreamContext, handle, device)?;
            Ok(simulation.timeline.stream(index).stream.device)
        })
    }

    fn capture_status(&self, stream: Stream) -> Result<CaptureStatus> {
        self.call_on(Call::CaptureStatus, stream.device, |simulation| {
            let index = simulation.live_stream(Call::CaptureStatus, stream)?;
            Ok(simulation.captures.status(index))
        })
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        self.call(Call::ExchangeCaptureMode, |simulation| {
            Ok(std::mem::replace(&mut simulation.thread().capture_mode, mode))
        })
    }

    fn synchronize_device(&self, device: DeviceId) -> Result<()> {
        self.call_on(Call::SynchronizeDevice, device, |simulation| {
            let Simulation { captures, timeline, .. } = simulation;
            captures.refuse_streams(|stream| timeline.stream(stream).stream.device == device)?;
            simulation.refuse_unsafe()?;
            wait_for_device(simulation, device)
        })
    }
}

impl SimDriver {
    /// As [`free`](Driver::free), but waits for nothing, as a library does that has mapped the memory itself: that every
    /// use is over has to be known.
    pub(super) fn free_at_once(&self, device: DeviceId, address: DevicePtr) -> Result<()> {
        self.call_on(Call::Free, device, |simulation| {
            simulation.refuse_unsafe()?;
            free_segment(simulation, device, address)
        })
    }
}

fn free_segment(simulation: &mut Simulation, device: DeviceId, address: DevicePtr) -> std::result::Result<(), Status> {
    let size = simulation.memory.segment_size(device, address.0)?;
    simulation.on_unmap(address.0, size);
    simulation.memory.free(device, address.0)?;
    simulation.forget_gone();
    simulation.ledger.on_bytes(Call::Free, size, 1);
    Ok(())
}

/// Waits on the host for all work queued on `device`.
fn wait_for_device(simulation: &mut Simulation, device: DeviceId) -> std::result::Result<(), Status> {
    let ends_at_ns = simulation.timeline.device_ends_at_ns(device);
    simulation.host_wait(ends_at_ns);
    simulation.timeline.see_device(device);
    require_context(simulation, device)
}

/// Fails if work that ran during this call has destroyed the context.
fn require_context(simulation: &Simulation, device: DeviceId) -> std::result::Result<(), Status> {
    if simulation.contexts[device.index()].is_lost { Err(Status::IllegalAddress) } else { Ok(()) }
}
