//! File descriptors between processes: what the standard library has no safe form of yet.
//!
//! A descriptor travels as ancillary data of a message on a local socket (`SCM_RIGHTS` in unix(7)); the kernel makes a new
//! one for the same thing in the receiving process. That needs no right beyond reaching the socket.

use std::ffi::c_void;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// How many descriptors one message carries; the kernel allows 253.
const PER_MESSAGE: usize = 64;
/// Room for the ancillary data of a message, aligned as its header has to be.
const CONTROL_WORDS: usize = 64;

/// Takes ownership of descriptors that the allocator has just had made for the caller.
pub(crate) fn take(descriptors: impl IntoIterator<Item = RawFd>) -> Vec<OwnedFd> {
    // SAFETY: `Allocator::share` on a real driver returns descriptors that are open and the caller's.
    unsafe { own(descriptors) }
}

/// # Safety
///
/// - Each is open, and nobody else closes it.
unsafe fn own(descriptors: impl IntoIterator<Item = RawFd>) -> Vec<OwnedFd> {
    let own = |descriptor| {
        // SAFETY: the caller promises that it is open and nobody else's.
        unsafe { OwnedFd::from_raw_fd(descriptor) }
    };
    descriptors.into_iter().map(own).collect()
}

/// The user that the process at the other end of a socket ran as when it connected.
pub(crate) fn peer_user(socket: &UnixStream) -> io::Result<u32> {
    let mut credentials = MaybeUninit::<libc::ucred>::zeroed();
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    let place = credentials.as_mut_ptr().cast::<c_void>();
    // SAFETY: the place has the size that is passed, and both outlive the call.
    let outcome =
        unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, place, &raw mut length) };
    if outcome != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all bytes are initialised, and any bytes are such a struct of three numbers.
    Ok(unsafe { credentials.assume_init() }.uid)
}

/// The user that this process runs as.
pub(crate) fn own_user() -> u32 {
    // SAFETY: the call takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// Bytes that nobody can guess.
pub(crate) fn random_bytes() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    // SAFETY: the place has the size that is passed and outlives the call.
    let count = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if usize::try_from(count) == Ok(bytes.len()) { Ok(bytes) } else { Err(io::Error::last_os_error()) }
}

/// Sends copies of the descriptors.
pub(crate) fn send(socket: &UnixStream, descriptors: &[OwnedFd]) -> io::Result<()> {
    for some in descriptors.chunks(PER_MESSAGE) {
        let raw: Vec<RawFd> = some.iter().map(AsRawFd::as_raw_fd).collect();
        send_some(socket, &raw)?;
    }
    Ok(())
}

fn send_some(socket: &UnixStream, descriptors: &[RawFd]) -> io::Result<()> {
    let mut message = Message::new(size_of_val(descriptors));
    let header = message.header();
    // SAFETY: the header has a control buffer that is large enough for one entry.
    let entry = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    // SAFETY: the argument is a length that fits.
    let length = unsafe { libc::CMSG_LEN(size_of_val(descriptors) as u32) };
    let kind = libc::cmsghdr { cmsg_len: length as usize, cmsg_level: libc::SOL_SOCKET, cmsg_type: libc::SCM_RIGHTS };
    // SAFETY: the entry lies in the control buffer, which is aligned for it.
    unsafe { entry.write(kind) };
    // SAFETY: an entry's data follow its header in the same buffer.
    let data = unsafe { libc::CMSG_DATA(entry) };
    let bytes: Vec<u8> = descriptors.iter().flat_map(|descriptor| descriptor.to_ne_bytes()).collect();
    // SAFETY: the buffer has room for these, and the list is elsewhere.
    unsafe { data.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    // SAFETY: all that the header points to outlives the call. A peer that is gone is an error and no signal.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL) };
    if sent == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Receives so many descriptors; fails if there are fewer.
pub(crate) fn receive(socket: &UnixStream, count: usize) -> io::Result<Vec<OwnedFd>> {
    let mut descriptors = Vec::new();
    while descriptors.len() < count {
        let some = receive_some(socket)?;
        if some.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        descriptors.extend(some);
    }
    Ok(descriptors)
}

fn receive_some(socket: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut message = Message::new(PER_MESSAGE * size_of::<RawFd>());
    let mut header = message.header();
    // SAFETY: all that the header points to outlives the call and may be written.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) };
    if received < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the header is the one that the call has filled in.
    let entry = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    // SAFETY: an entry that is not null lies in the control buffer and was filled in.
    let Some(kind) = (unsafe { entry.as_ref() }) else { return Ok(Vec::new()) };
    if kind.cmsg_level != libc::SOL_SOCKET || kind.cmsg_type != libc::SCM_RIGHTS {
        return Ok(Vec::new());
    }
    // SAFETY: the argument is a length that fits.
    let empty = unsafe { libc::CMSG_LEN(0) } as usize;
    // SAFETY: an entry's data follow its header in the same buffer.
    let data = unsafe { libc::CMSG_DATA(entry) };
    // SAFETY: the kernel has written so many bytes there.
    let bytes = unsafe { std::slice::from_raw_parts(data, kind.cmsg_len - empty) };
    let (descriptors, _) = bytes.as_chunks();
    // SAFETY: the kernel has made them for this process just now.
    Ok(unsafe { own(descriptors.iter().map(|bytes| RawFd::from_ne_bytes(*bytes))) })
}

/// A message of one byte, with room for ancillary data.
struct Message {
    byte: [u8; 1],
    part: libc::iovec,
    control: [u64; CONTROL_WORDS],
    control_bytes: usize,
}

impl Message {
    /// With room for so many bytes of ancillary data.
    fn new(bytes: usize) -> Self {
        // SAFETY: the argument is a length that fits.
        let control_bytes = unsafe { libc::CMSG_SPACE(bytes as u32) } as usize;
        assert!(control_bytes <= CONTROL_WORDS * size_of::<u64>(), "{bytes} bytes of ancillary data");
        let part = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 1 };
        Self { byte: [0], part, control: [0; CONTROL_WORDS], control_bytes }
    }

    /// The header for the system call; the message must stay where it is as long as it is used.
    fn header(&mut self) -> libc::msghdr {
        self.part.iov_base = self.byte.as_mut_ptr().cast();
        // SAFETY: any bytes are such a struct, and all zero is an empty one.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = &raw mut self.part;
        header.msg_iovlen = 1;
        header.msg_control = self.control.as_mut_ptr().cast();
        header.msg_controllen = self.control_bytes as _;
        header
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn descriptors_arrive_in_order_however_many_there_are() {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        let mut ends = Vec::new();
        let mut sent = Vec::new();
        for index in 0..150_u8 {
            let (reader, mut writer) = io::pipe().expect("a pipe");
            writer.write_all(&[index]).expect("room for a byte");
            ends.push(writer);
            sent.push(OwnedFd::from(reader));
        }
        send(&ours, &sent).expect("the other end is open");
        drop(sent);
        let received = receive(&theirs, 150).expect("they were sent");
        let bytes = received.into_iter().map(|descriptor| {
            let mut byte = [0];
            File::from(descriptor).read_exact(&mut byte).expect("the byte is in the pipe");
            byte[0]
        });
        assert!(bytes.eq(0..150));
        assert_eq!(peer_user(&ours).expect("it is a local socket"), own_user());
    }

    #[test]
    fn end_of_the_other_side_is_an_error() {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        drop(ours);
        assert!(receive(&theirs, 1).is_err());
    }
}
