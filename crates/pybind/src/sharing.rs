//! Sending allocations to other processes of the same user, and receiving theirs.
//!
//! What names an allocation travels as text through whatever channel the program has (torch puts it into its queues). For a
//! segment that is all. The descriptors of handles cannot be written down: they wait in this process, at a local socket
//! that the text names, and are handed to whoever brings the text back, by `SCM_RIGHTS`. So two processes need no rights
//! over each other, as they would to reach into each other's table of descriptors: they have to run as the same user, in
//! the same network namespace, as those of one container do.
//!
//! Descriptors wait until the allocation is freed: they keep its memory alive. However often an allocation is sent, it is by
//! the same text, so that this process holds one set of them and the receiver maps it once.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use alloc_core::allocator::{Imported, Shared, SharedName};
use alloc_core::driver::Ticket;
use alloc_core::id::DevicePtr;

use crate::backend::Backend;
use crate::failure::Failure;
use crate::ffi::descriptors;
use crate::hooks::{device_id, guarded, notice};
use crate::process;

/// How long one process waits for another's answer.
const PATIENCE: Duration = Duration::from_secs(20);
/// What every text begins with.
const MARK: &str = "rallocator1";
/// Bytes of a request: the text's secret and the number of what is wanted.
const REQUEST_BYTES: usize = 24;

/// An allocation's handles, waiting to be fetched.
struct Offer {
    /// What names them to another process.
    text: String,
    /// How far into the memory that they name the allocation begins.
    offset: u64,
    descriptors: Arc<Vec<OwnedFd>>,
}

#[derive(Default)]
struct Waiting {
    last: u64,
    /// By their numbers.
    offers: HashMap<u64, Offer>,
    /// The number of each allocation that is offered, by its address.
    numbers: HashMap<DevicePtr, u64>,
}

impl Waiting {
    fn offer_of(&self, address: DevicePtr) -> Option<&Offer> {
        self.offers.get(self.numbers.get(&address)?)
    }
}

/// The socket of this process.
struct Server {
    name: String,
    secret: [u8; 16],
}

static WAITING: Mutex<Option<Waiting>> = Mutex::new(None);
/// How much waits, so that a free without any need not take the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// What other processes sent.
#[derive(Default)]
struct Imports {
    /// By its address.
    open: HashMap<u64, Imported>,
    /// Given up, but a capture has kept it from being closed.
    unwanted: Vec<Imported>,
}

static IMPORTS: Mutex<Option<Imports>> = Mutex::new(None);

fn waiting() -> MutexGuard<'static, Option<Waiting>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with_imports<T>(change: impl FnOnce(&mut Imports) -> T) -> T {
    change(IMPORTS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// The text that names the allocation at an address to another process, and how far into the named memory it begins.
pub(crate) fn share(address: DevicePtr) -> Result<(String, u64), Failure> {
    let backend = process::for_request()?;
    if matches!(backend, Backend::Simulated(_)) {
        return Err(Failure::Sharing("a simulated GPU is in one process".to_owned()));
    }
    if let Some(offered) = offered(address) {
        return Ok(offered);
    }
    let abandon = |descriptor| drop(descriptors::take([descriptor]));
    let shared = guarded(|| Ok(backend.share(address, abandon)?))?;
    let Shared { offset, name } = shared.ok_or(Failure::NotAllocated(address))?;
    match name {
        SharedName::Segment(Ticket(bytes)) => Ok((format!("{MARK} segment {}", to_hex(&bytes)), offset)),
        SharedName::Handles(pieces) => {
            let sizes: Vec<String> = pieces.iter().map(|(_, size)| size.to_string()).collect();
            let owned = descriptors::take(pieces.into_iter().map(|(descriptor, _)| descriptor));
            let server = server().map_err(|error| Failure::Sharing(error.to_string()))?;
            Ok((offer(server, address, offset, &sizes.join(","), owned), offset))
        }
    }
}

/// What [`share`] said of an allocation whose handles wait already.
fn offered(address: DevicePtr) -> Option<(String, u64)> {
    waiting().as_ref().and_then(|waiting| waiting.offer_of(address)).map(|offer| (offer.text.clone(), offer.offset))
}

/// Has an allocation's handles wait until it is freed. Returns the text that names them.
fn offer(server: &Server, address: DevicePtr, offset: u64, sizes: &str, owned: Vec<OwnedFd>) -> String {
    let mut guard = waiting();
    let waiting = guard.get_or_insert_default();
    // Another thread may have sent it meanwhile.
    if let Some(earlier) = waiting.offer_of(address) {
        return earlier.text.clone();
    }
    waiting.last += 1;
    let number = waiting.last;
    let text = format!("{MARK} handles {} {} {number} {sizes}", server.name, to_hex(&server.secret));
    waiting.offers.insert(number, Offer { text: text.clone(), offset, descriptors: Arc::new(owned) });
    waiting.numbers.insert(address, number);
    COUNT.store(waiting.offers.len(), Ordering::Release);
    text
}

/// The allocation at an address is being freed: nobody may fetch it any more.
#[inline]
pub(crate) fn on_free(address: DevicePtr) {
    if COUNT.load(Ordering::Relaxed) > 0 {
        forget(address);
    }
}

#[cold]
fn forget(address: DevicePtr) {
    let mut guard = waiting();
    if let Some(waiting) = guard.as_mut()
        && let Some(number) = waiting.numbers.remove(&address)
    {
        waiting.offers.remove(&number);
        COUNT.store(waiting.offers.len(), Ordering::Release);
    }
}

/// The socket, made and served from the first call on.
fn server() -> io::Result<&'static Server> {
    static SERVER: OnceLock<Server> = OnceLock::new();
    static STARTING: Mutex<()> = Mutex::new(());
    let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(server) = SERVER.get() {
        return Ok(server);
    }
    let (secret, part) = (descriptors::random_bytes()?, descriptors::random_bytes()?);
    let name = format!("rallocator-{}-{}", std::process::id(), to_hex(&part));
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
    std::thread::Builder::new().name("rallocator-share".to_owned()).spawn(move || {
        for socket in listener.incoming().flatten() {
            // Who asks for what is not there, or is not allowed to ask, finds the socket closed.
            let _ = answer(&socket, &secret);
        }
    })?;
    Ok(SERVER.get_or_init(|| Server { name, secret }))
}

/// Hands out what one other process asks for.
fn answer(mut socket: &UnixStream, secret: &[u8; 16]) -> io::Result<()> {
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    if descriptors::peer_user(socket)? != descriptors::own_user() {
        return Ok(());
    }
    let mut request = [0; REQUEST_BYTES];
    socket.read_exact(&mut request)?;
    let (shown, number) = request.split_at(secret.len());
    let number = u64::from_le_bytes(number.try_into().unwrap_or_default());
    if shown != secret {
        return Ok(());
    }
    let found = waiting().as_ref().and_then(|waiting| Some(Arc::clone(&waiting.offers.get(&number)?.descriptors)));
    found.map_or(Ok(()), |all| descriptors::send(socket, &all))
}

/// An address in this process, for `device` to use, of the memory that a text of another process names.
pub(crate) fn open(text: &str, device: i32) -> Result<DevicePtr, Failure> {
    let backend = process::for_request()?;
    let device = device_id(device)?;
    process::mark_in_use();
    // What is fetched is closed when it is mapped: the mapping keeps the memory.
    let mut fetched = Vec::new();
    let name = name_of(text, &mut fetched)?;
    let imported = guarded(|| Ok(backend.import(device, &name)?))?;
    with_imports(|imports| imports.open.insert(imported.base.0, imported));
    Ok(imported.base)
}

/// Gives up what [`open`] returned.
pub(crate) fn close(base: DevicePtr) {
    notice(|backend| {
        let unwanted = with_imports(|imports| {
            imports.unwanted.extend(imports.open.remove(&base.0));
            std::mem::take(&mut imports.unwanted)
        });
        for imported in unwanted {
            // What the driver refuses to give up stays, which harms nobody: its owner may free it all the same.
            if let Ok(false) = backend.close_import(&imported) {
                with_imports(|imports| imports.unwanted.push(imported));
            }
        }
    });
}

fn name_of(text: &str, fetched: &mut Vec<OwnedFd>) -> Result<SharedName, Failure> {
    let words: Vec<&str> = text.split(' ').collect();
    let unknown = || Failure::Sharing("it was not sent by a process with rallocator's bridge".to_owned());
    match words.as_slice() {
        [MARK, "segment", ticket] => {
            from_hex(ticket).map(|bytes| SharedName::Segment(Ticket(bytes))).ok_or_else(unknown)
        }
        [MARK, "handles", name, secret, number, sizes] => {
            let sizes: Option<Vec<u64>> = sizes.split(',').map(|size| size.parse().ok()).collect();
            let (sizes, secret) = sizes.zip(from_hex::<16>(secret)).ok_or_else(unknown)?;
            let number: u64 = number.parse().map_err(|_| unknown())?;
            *fetched = fetch(name, &secret, number, sizes.len()).map_err(|error| {
                Failure::Sharing(format!(
                    "its sender does not hand it out ({error}). The sending process has to live, to hold the tensor, and \
                     to run as the same user in the same container"
                ))
            })?;
            Ok(SharedName::Handles(fetched.iter().map(AsRawFd::as_raw_fd).zip(sizes).collect()))
        }
        _ => Err(unknown()),
    }
}

/// Fetches what waits in another process.
fn fetch(name: &str, secret: &[u8; 16], number: u64, count: usize) -> io::Result<Vec<OwnedFd>> {
    let mut socket = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    socket.write_all(&[&secret[..], &number.to_le_bytes()].concat())?;
    descriptors::receive(&socket, count)
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

fn from_hex<const LENGTH: usize>(text: &str) -> Option<[u8; LENGTH]> {
    let digit = |index: usize| text.get(2 * index..2 * index + 2).and_then(|byte| u8::from_str_radix(byte, 16).ok());
    let bytes: Option<Vec<u8>> = (0..LENGTH).map(digit).collect();
    bytes.filter(|_| text.len() == 2 * LENGTH)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn what_waits_is_fetched_as_often_as_asked_until_its_memory_is_freed() {
        let (reader, mut writer) = io::pipe().expect("a pipe");
        writer.write_all(b"ab").expect("room for two bytes");
        let server = server().expect("a socket");
        let Server { name, secret } = server;
        let number = number_of(&offer(server, DevicePtr(0x5000), 0, "1", vec![reader.into()]));
        let other = number_of(&offer(server, DevicePtr(0x6000), 0, "", Vec::new()));
        for expected in *b"ab" {
            let fetched = fetch(name, secret, number, 1).expect("it waits").remove(0);
            let mut byte = [0];
            File::from(fetched).read_exact(&mut byte).expect("the byte is in the pipe");
            assert_eq!(byte[0], expected);
        }
        assert!(fetch(name, &[7; 16], number, 1).is_err(), "another secret");
        assert!(fetch(name, secret, number + 99, 1).is_err(), "another number");
        on_free(DevicePtr(0x5000));
        assert!(fetch(name, secret, number, 1).is_err(), "its memory is freed");
        on_free(DevicePtr(0x6000));
        assert!(other > number && offered(DevicePtr(0x6000)).is_none());
    }

    #[test]
    fn allocation_that_is_sent_again_and_again_waits_once_by_the_same_text_until_it_is_freed() {
        let (server, address) = (server().expect("a socket"), DevicePtr(0x7000));
        let send = || offer(server, address, 512, "2097152", vec![io::pipe().expect("a pipe").0.into()]);
        assert_eq!(offered(address), None);
        let text = send();
        for _ in 0..5_000 {
            assert_eq!(send(), text);
        }
        assert_eq!(offered(address), Some((text.clone(), 512)));
        assert!(fetch(&server.name, &server.secret, number_of(&text), 1).is_ok());
        on_free(address);
        assert_eq!(offered(address), None);
        assert!(send() != text, "what lies there now is another allocation");
        on_free(address);
    }

    fn number_of(text: &str) -> u64 {
        text.split(' ').nth(4).and_then(|number| number.parse().ok()).expect("a text with a number")
    }

    #[test]
    fn texts_of_others_are_refused() {
        let mut fetched = Vec::new();
        let ticket = to_hex(&[3; 64]);
        assert_eq!(
            name_of(&format!("{MARK} segment {ticket}"), &mut fetched).ok(),
            Some(SharedName::Segment(Ticket([3; 64])))
        );
        for text in ["", "\u{2}c", "rallocator1 segment 00", "rallocator1 handles a b c", "rallocator2 segment"] {
            assert!(name_of(text, &mut fetched).is_err(), "{text:?}");
        }
        let gone = format!("{MARK} handles nobody-listens-here {} 1 4096", to_hex(&[0; 16]));
        assert!(name_of(&gone, &mut fetched).is_err_and(|failure| failure.to_string().contains("sending process")));
    }
}
