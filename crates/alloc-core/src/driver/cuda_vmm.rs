//! Virtual memory management: address ranges, physical handles, mappings.
//!
//! cudarc has no safe form of these calls. They need no particular context, but the caller makes the device's primary
//! context current, as for all others. Addresses, sizes and handles are plain numbers to the driver, which refuses what
//! it did not hand out; so none of these functions can be misused from safe code other than by taking away memory that
//! queued work still touches, and that is the allocator's to know (the trait says so at `unmap` and `free_range`).

#![expect(unsafe_code, reason = "the driver's virtual memory calls have no safe wrapper in cudarc")]

use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::sys::{
    CUdevice, CUdevice_attribute, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType,
    CUmemLocation, CUmemLocationType,
};
use smallvec::SmallVec;

use super::cuda::attribute;
use super::cuda_library::{self as library, check, read};
use super::{Call, DriverError, Result, Status};
use crate::id::{DevicePtr, PhysicalHandle};

/// What physical memory is asked to be good for, beyond being memory.
///
/// Both uses name the physical memory itself, and neither can be added later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Uses {
    /// Network cards may register it.
    rdma: bool,
    /// It may be exported to another process as a file descriptor.
    export: bool,
}

/// From most to least useful. A device whose container forbids export often still allows RDMA.
const USES: [Uses; 3] =
    [Uses { rdma: true, export: true }, Uses { rdma: true, export: false }, Uses { rdma: false, export: false }];

/// Which uses a device's memory can be made for, learnt from what the driver refuses.
#[derive(Debug, Default)]
pub(super) struct HandleUses {
    /// The first entry of [`USES`] not known to be refused. It only grows.
    first_allowed: AtomicUsize,
}

impl HandleUses {
    /// Creates a handle with all the uses that the device allows, and remembers those that it does not.
    pub(super) fn create(&self, device: CUdevice, size: u64) -> Result<PhysicalHandle> {
        let mut entry = self.first_allowed.load(Ordering::Relaxed);
        loop {
            let outcome = create(&properties(device, supported(device, USES[entry])?), size);
            match outcome {
                Err(DriverError { status: Status::NotSupported | Status::NotPermitted, .. })
                    if entry + 1 < USES.len() =>
                {
                    entry += 1;
                }
                Ok(handle) => {
                    self.first_allowed.fetch_max(entry, Ordering::Relaxed);
                    return Ok(handle);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Those of `wanted` that the device says it supports.
fn supported(device: CUdevice, wanted: Uses) -> Result<Uses> {
    use CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED as RDMA,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED as EXPORT,
    };
    Ok(Uses {
        rdma: wanted.rdma && attribute(device, RDMA)? != 0,
        export: wanted.export && attribute(device, EXPORT)? != 0,
    })
}

/// Pinned memory on `device`, in the driver's words.
fn properties(device: CUdevice, uses: Uses) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: if uses.export {
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        } else {
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
        },
        location: location(device),
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: u8::from(uses.rdma),
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn location(device: CUdevice) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

/// The smallest size that handles and mappings on `device` are multiples of, in bytes.
pub(super) fn granularity(device: CUdevice) -> Result<u64> {
    let properties = properties(device, Uses { rdma: false, export: false });
    let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    let bytes = read(Call::Attribute, 0, |bytes| {
        // SAFETY: Both pointers are to locals that outlive the call, and the properties are filled in whole.
        unsafe { library::cuMemGetAllocationGranularity(bytes, &raw const properties, minimum) }
    })?;
    Ok(bytes as u64)
}

/// Sets addresses aside.
pub(super) fn reserve(size: u64) -> Result<DevicePtr> {
    let base = read(Call::ReserveRange, 0, |base| {
        // SAFETY: `base` is a local that outlives the call; alignment 0 and address 0 leave the choice to the driver,
        // and flags must be 0.
        unsafe { library::cuMemAddressReserve(base, size as usize, 0, 0, 0) }
    })?;
    Ok(DevicePtr(base))
}

/// Gives addresses back.
pub(super) fn free_range(base: DevicePtr, size: u64) -> Result<()> {
    // SAFETY: The driver refuses a range that it did not reserve. The allocator guarantees that nothing uses it.
    check(Call::FreeRange, unsafe { library::cuMemAddressFree(base.0, size as usize) })
}

fn create(properties: &CUmemAllocationProp, size: u64) -> Result<PhysicalHandle> {
    let handle = read(Call::CreateHandle, 0, |handle| {
        // SAFETY: Both pointers outlive the call, the properties are filled in whole, and flags must be 0.
        unsafe { library::cuMemCreate(handle, size as usize, properties, 0) }
    })?;
    Ok(PhysicalHandle(handle))
}

/// Gives a handle back.
pub(super) fn release(handle: PhysicalHandle) -> Result<()> {
    // SAFETY: The handle came from `create`, the trait's only source of handles, and the allocator releases it once.
    check(Call::ReleaseHandle, unsafe { library::cuMemRelease(handle.0) })
}

/// The kind of name for a handle that other processes understand.
const DESCRIPTOR: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A descriptor for a handle's memory.
pub(super) fn export(handle: PhysicalHandle) -> Result<i32> {
    read(Call::ExportHandle, -1_i32, |descriptor| {
        // SAFETY: The handle came from `create` and is not released, which the allocator guarantees; the driver writes a
        // descriptor, which is an `int`, to a local that outlives the call. Flags must be 0.
        unsafe { library::cuMemExportToShareableHandle(ptr::from_mut(descriptor).cast(), handle.0, DESCRIPTOR, 0) }
    })
}

/// A handle for the memory that a descriptor names.
pub(super) fn import(descriptor: i32) -> Result<PhysicalHandle> {
    let handle = read(Call::ImportHandle, 0, |handle| {
        let descriptor = ptr::without_provenance_mut(descriptor as usize);
        // SAFETY: `handle` is a local that outlives the call. The descriptor is passed as a number in a pointer's place,
        // and the driver refuses one that is not of its making.
        unsafe { library::cuMemImportFromShareableHandle(handle, descriptor, DESCRIPTOR) }
    })?;
    Ok(PhysicalHandle(handle))
}

/// Maps a whole handle.
pub(super) fn map(address: DevicePtr, size: u64, handle: PhysicalHandle) -> Result<()> {
    // SAFETY: The driver refuses addresses outside a reservation and addresses that are mapped; the handle came from
    // `create` and is not released yet, which the allocator guarantees. Offset and flags must be 0.
    check(Call::Map, unsafe { library::cuMemMap(address.0, size as usize, 0, handle.0, 0) })
}

/// Lets devices read and write mapped addresses.
pub(super) fn set_access(address: DevicePtr, size: u64, devices: impl Iterator<Item = CUdevice>) -> Result<()> {
    let access: SmallVec<[CUmemAccessDesc; 8]> = devices
        .map(|device| CUmemAccessDesc {
            location: location(device),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        })
        .collect();
    // SAFETY: The pointer and the count describe the list above, which outlives the call; the driver refuses addresses
    // that are not mapped.
    check(Call::SetAccess, unsafe { library::cuMemSetAccess(address.0, size as usize, access.as_ptr(), access.len()) })
}

/// Removes mappings.
pub(super) fn unmap(address: DevicePtr, size: u64) -> Result<()> {
    // SAFETY: The driver refuses what is not mapped. The allocator guarantees that no queued work touches the addresses
    // any more.
    check(Call::Unmap, unsafe { library::cuMemUnmap(address.0, size as usize) })
}
