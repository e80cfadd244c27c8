//! Why a hook could not do what it was asked: the texts that a user of torch reads.

use alloc_core::checkpoint::RestoreError;
use alloc_core::error::AllocError;
use alloc_core::id::DevicePtr;
use alloc_core::source::SourceError;

/// A request that cannot be met, at the boundary to torch.
///
/// Everything but [`Failure::Allocator`] with an out-of-memory error becomes a `RuntimeError` in Python.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The library was loaded, but nobody called `rallocator.enable()`.
    #[error("rallocator is loaded but not enabled: call rallocator.enable() right after `import torch`.")]
    NotEnabled,
    /// The process is a forked child of one that had used the GPU.
    #[error(
        "rallocator: GPU memory cannot be allocated in a forked child of a process that had already used the GPU. \
         Start the child with the 'spawn' or 'forkserver' method of multiprocessing, or fork before the GPU is first \
         used."
    )]
    Forked,
    /// The process is ending.
    #[error("rallocator: GPU memory cannot be allocated any more, since the process is ending.")]
    Exiting,
    /// A device index that cannot be one.
    #[error("rallocator: {0} is not the index of a device.")]
    Device(i32),
    /// A number from C that stands for no choice.
    #[error("rallocator: {0} says nothing of whether memory may move; 0 to 2 do.")]
    Moving(u32),
    /// A bug in rallocator: a panic was caught at the boundary.
    #[error("rallocator: internal error, please report it: {0}")]
    Panic(String),
    /// Something is to be sent to another process that is not there.
    #[error("rallocator: nothing is allocated at {0:?}, so it cannot be sent to another process.")]
    NotAllocated(DevicePtr),
    /// Memory cannot go from one process to another.
    #[error("rallocator: this memory cannot be used in another process than its own: {0}.")]
    Sharing(String),
    /// A private pool cannot go back to a checkpoint.
    #[error("rallocator: {0}")]
    Restore(#[from] RestoreError),
    /// What the allocator itself answered.
    #[error(transparent)]
    Allocator(#[from] AllocError),
}

impl Failure {
    /// Whether this is the failure that torch calls `torch.OutOfMemoryError`.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Allocator(AllocError::OutOfMemory(_)))
    }

    /// Whether a source of a private pool failed, which knows more of it.
    pub(crate) fn is_of_source(&self) -> bool {
        let Self::Allocator(AllocError::Source(error)) = self else { return false };
        matches!(error, SourceError::NotObtained { .. } | SourceError::NotTakenBack { .. })
    }

    /// The failure for a panic that was caught, with the text that it carried.
    pub(crate) fn from_panic(payload: &(dyn std::any::Any + Send)) -> Self {
        let text = if let Some(text) = payload.downcast_ref::<&str>() {
            (*text).to_owned()
        } else if let Some(text) = payload.downcast_ref::<String>() {
            text.clone()
        } else {
            "a panic without a message".to_owned()
        };
        Self::Panic(text)
    }
}
