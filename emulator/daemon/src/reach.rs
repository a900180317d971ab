//! The memory of clients, as the card reaches it: mapped here, or in the client's own process.

#![allow(unsafe_code)]

use crate::quota::Counted;
use softhca_engine::{Atomic, Memory, MemoryFault, MemoryId};
use softhca_queue::{Access, Block};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// What a host's card is reaching for now, for whoever watches that it comes back.
#[derive(Default)]
pub(crate) struct Reaching {
    /// Odd while the card is inside of a process.
    serial: AtomicU64,
    process: AtomicU32,
}

impl Reaching {
    fn inside<R>(&self, process: u32, act: impl FnOnce() -> R) -> R {
        self.process.store(process, Ordering::Relaxed);
        self.serial.fetch_add(1, Ordering::Release);
        let result = act();
        self.serial.fetch_add(1, Ordering::Release);
        result
    }

    /// The access that is under way: its number and the process.
    pub fn now(&self) -> Option<(u64, u32)> {
        let serial = self.serial.load(Ordering::Acquire);
        (serial % 2 == 1).then(|| (serial, self.process.load(Ordering::Relaxed)))
    }
}

/// The most pieces that one call of the kernel copies.
const MOST_PIECES: usize = 128;

const EMPTY: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

fn place(address: u64, length: usize) -> libc::iovec {
    libc::iovec { iov_base: address as *mut _, iov_len: length }
}

/// How many of the last bytes are to be seen after all others: a word of eight or four if there is one. Fewer the
/// kernel copies byte by byte, not always in order, so that the last byte goes alone.
fn tail_of(bytes: &[u8]) -> usize {
    match bytes.len() {
        0 => 0,
        4 => 4,
        8.. => 8,
        _ => 1,
    }
}

/// A process whose memory is reached, while it lives.
pub(crate) struct Process {
    number: u32,
    alive: AtomicBool,
    /// The kernel does not let us in with process_vm_*.
    forbidden: AtomicBool,
    /// /proc/self/mem of the client, opened by itself: works where the kernel refuses process_vm_*.
    memory: Option<File>,
}

impl Process {
    pub fn new(number: u32, memory: Option<File>) -> Process {
        Process { number, alive: AtomicBool::new(true), forbidden: AtomicBool::new(false), memory }
    }

    /// It is gone: its number may soon be another's.
    pub fn bury(&self) {
        self.alive.store(false, Ordering::Release);
    }

    fn is_alive(&self) -> Result<(), MemoryFault> {
        if self.alive.load(Ordering::Acquire) { Ok(()) } else { Err(MemoryFault) }
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.is_alive()?;
        if into.is_empty() {
            return Ok(());
        }
        if let Some(memory) = self.passed() {
            return memory.read_exact_at(into, address).map_err(|_| MemoryFault);
        }
        let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: into.len() };
        // SAFETY: `local` is `into`, which is ours alone; the other side is checked by the kernel.
        let done = unsafe { libc::process_vm_readv(self.number as i32, &local, 1, &remote, 1, 0) };
        if done == into.len() as isize {
            return Ok(());
        }
        if self.is_forbidden(done) { self.read(address, into) } else { Err(MemoryFault) }
    }

    /// The last bytes are an access of their own, after all others.
    fn write(&self, address: u64, from: &[u8]) -> Result<(), MemoryFault> {
        self.is_alive()?;
        if from.is_empty() {
            return Ok(());
        }
        let (head, tail) = from.split_at(from.len() - tail_of(from));
        if let Some(memory) = self.passed() {
            let written = memory
                .write_all_at(head, address)
                .and_then(|()| memory.write_all_at(tail, address + head.len() as u64));
            return written.map_err(|_| MemoryFault);
        }
        let done = self.write_in_order::<2>(address, &[head, tail]);
        if done == from.len() as isize {
            return Ok(());
        }
        if self.is_forbidden(done) { self.write(address, from) } else { Err(MemoryFault) }
    }

    /// Stores up to `MOST` pieces behind each other, each after those before it. Returns what the kernel says.
    fn write_in_order<const MOST: usize>(&self, address: u64, pieces: &[&[u8]]) -> isize {
        let (mut local, mut remote) = ([EMPTY; MOST], [EMPTY; MOST]);
        let mut length = 0;
        for (index, piece) in pieces.iter().enumerate() {
            local[index] = libc::iovec { iov_base: piece.as_ptr() as *mut _, iov_len: piece.len() };
            remote[index] = place(address + length as u64, piece.len());
            length += piece.len();
        }
        let count = pieces.len() as libc::c_ulong;
        // Each piece is a copy of its own, and a strongly ordered processor shows copies in their order. Others
        // need what the kernel does between two places.
        let places = if cfg!(target_arch = "x86_64") { 1 } else { count };
        if places == 1 {
            remote[0] = place(address, length);
        }
        let (local, remote) = (local.as_ptr(), remote.as_ptr());
        // SAFETY: `local` is only read, and is `pieces`; the other side is checked by the kernel.
        unsafe { libc::process_vm_writev(self.number as i32, local, count, remote, places, 0) }
    }

    /// As [`Process::read`], into pieces of `into`. False if there is no way, or not for all of it.
    fn read_run(&self, address: u64, length: usize, into: &mut [u8], piece: usize, stride: usize) -> bool {
        if self.is_alive().is_err() || self.passed().is_some() || length.div_ceil(piece) > MOST_PIECES {
            return false;
        }
        let mut local = [EMPTY; MOST_PIECES];
        let (mut count, mut left) = (0, length);
        for (slot, bytes) in local.iter_mut().zip(into.chunks_mut(stride)) {
            let size = bytes.len().min(piece).min(left);
            *slot = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: size };
            left -= size;
            count += 1;
            if left == 0 {
                break;
            }
        }
        let remote = place(address, length);
        let local = local.as_ptr();
        // SAFETY: `local` are pieces of `into`, which is ours alone; the other side is checked by the kernel.
        let done = unsafe { libc::process_vm_readv(self.number as i32, local, count, &remote, 1, 0) };
        left == 0 && done == length as isize
    }

    /// As [`Process::write`] for each piece, one behind the other. Returns how many are in place, from the first.
    fn write_run(&self, address: u64, pieces: &[&[u8]]) -> usize {
        if self.is_alive().is_err() || self.passed().is_some() {
            return 0;
        }
        let mut parts: [&[u8]; MOST_PIECES] = [&[]; MOST_PIECES];
        let pieces = &pieces[..pieces.len().min(MOST_PIECES / 2)];
        for (pair, piece) in parts.chunks_mut(2).zip(pieces) {
            (pair[0], pair[1]) = piece.split_at(piece.len() - tail_of(piece));
        }
        let done = self.write_in_order::<MOST_PIECES>(address, &parts[..2 * pieces.len()]);
        let mut left = usize::try_from(done).unwrap_or(0);
        let is_whole = |piece: &&&[u8]| {
            let fits = piece.len() <= left;
            left -= piece.len().min(left);
            fits
        };
        pieces.iter().take_while(is_whole).count()
    }

    /// The client's own descriptor, once it is known to be the only way in.
    fn passed(&self) -> Option<&File> {
        self.memory.as_ref().filter(|_| self.forbidden.load(Ordering::Relaxed))
    }

    /// Whether the kernel just refused to let us into the process at all, and there is another way.
    fn is_forbidden(&self, done: isize) -> bool {
        let error = std::io::Error::last_os_error().raw_os_error();
        let forbidden =
            done < 0 && matches!(error, Some(libc::EPERM | libc::ENOSYS)) && self.memory.is_some();
        if forbidden {
            self.forbidden.store(true, Ordering::Relaxed);
        }
        forbidden
    }

    /// Whether all of a range is mapped with the rights that `access` needs.
    pub fn check(&self, address: u64, length: u64, access: Access) -> Result<(), String> {
        let end = address.checked_add(length).ok_or("the range ends beyond the address space")?;
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.number))
            .map_err(|error| format!("the mappings of process {} cannot be read: {error}", self.number))?;
        let mut at = address;
        for line in maps.lines() {
            let Some((range, rest)) = line.split_once(' ') else { continue };
            let Some((from, to)) = range.split_once('-') else { continue };
            let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16)) else {
                continue;
            };
            if to <= at {
                continue;
            }
            if from > at || at >= end {
                break;
            }
            if !rest.starts_with('r') {
                return Err(format!("{at:#x} is mapped, but cannot be read"));
            }
            if access.contains(Access::LOCAL_WRITE) && rest.as_bytes().get(1) != Some(&b'w') {
                return Err(format!("local write is asked for, but {at:#x} is mapped read-only"));
            }
            at = to;
        }
        if at < end { Err(format!("nothing is mapped at {at:#x}")) } else { Ok(()) }
    }
}

/// The memory behind one region.
pub(crate) enum Reach {
    /// Mapped here too.
    Mapped(Block, #[allow(dead_code, reason = "counts while it lives")] Counted),
    /// In the client's process.
    Process { process: Arc<Process>, address: u64, length: u64 },
}

impl Reach {
    fn is_far(&self) -> bool {
        matches!(self, Reach::Process { .. })
    }

    fn locate(address: u64, size: u64, offset: u64, length: usize) -> Result<u64, MemoryFault> {
        let end = offset.checked_add(length as u64).ok_or(MemoryFault)?;
        if end <= size { Ok(address + offset) } else { Err(MemoryFault) }
    }
}

/// The memory of all clients of a host.
#[derive(Default)]
pub(crate) struct Memories {
    reaching: Arc<Reaching>,
    all: Vec<Option<Arc<Reach>>>,
    free: Vec<u32>,
    /// How many of them are in processes.
    far: usize,
}

impl Memories {
    pub fn new(reaching: Arc<Reaching>) -> Memories {
        Memories { reaching, ..Memories::default() }
    }

    pub fn add(&mut self, reach: Arc<Reach>) -> MemoryId {
        self.far += usize::from(reach.is_far());
        match self.free.pop() {
            Some(index) => {
                self.all[index as usize] = Some(reach);
                MemoryId(index)
            }
            None => {
                self.all.push(Some(reach));
                MemoryId(self.all.len() as u32 - 1)
            }
        }
    }

    /// Takes one out. Let it go outside of the lock: unmapping takes time.
    pub fn remove(&mut self, memory: MemoryId) -> Option<Arc<Reach>> {
        let removed = self.all.get_mut(memory.0 as usize)?.take();
        if let Some(reach) = &removed {
            self.far -= usize::from(reach.is_far());
            self.free.push(memory.0);
        }
        removed
    }

    pub fn get(&self, memory: MemoryId) -> Result<&Arc<Reach>, MemoryFault> {
        self.all.get(memory.0 as usize).and_then(Option::as_ref).ok_or(MemoryFault)
    }

    /// The process that a range is in and where, if it is in one.
    fn in_process(&self, memory: MemoryId, offset: u64, length: usize) -> Option<(&Process, u64)> {
        match &**self.get(memory).ok()? {
            Reach::Mapped(..) => None,
            Reach::Process { process, address, length: size } => {
                Some((process, Reach::locate(*address, *size, offset, length).ok()?))
            }
        }
    }
}

impl Memory for Memories {
    fn read(&self, memory: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        match &**self.get(memory)? {
            Reach::Mapped(block, _) => block.read(offset, into),
            Reach::Process { process, address, length } => {
                let at = Reach::locate(*address, *length, offset, into.len())?;
                self.reaching.inside(process.number, || process.read(at, into))
            }
        }
    }

    fn write(&mut self, memory: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        match &**self.get(memory)? {
            Reach::Mapped(block, _) => block.write(offset, from),
            Reach::Process { process, address, length } => {
                let at = Reach::locate(*address, *length, offset, from.len())?;
                self.reaching.inside(process.number, || process.write(at, from))
            }
        }
    }

    fn is_far(&self) -> bool {
        self.far > 0
    }

    fn read_run(
        &self,
        memory: MemoryId,
        offset: u64,
        length: usize,
        into: &mut [u8],
        piece: usize,
        stride: usize,
    ) -> bool {
        let Some((process, at)) = self.in_process(memory, offset, length) else { return false };
        self.reaching.inside(process.number, || process.read_run(at, length, into, piece, stride))
    }

    fn write_run(&mut self, memory: MemoryId, offset: u64, pieces: &[&[u8]]) -> usize {
        let length = pieces.iter().map(|piece| piece.len()).sum();
        let Some((process, at)) = self.in_process(memory, offset, length) else { return 0 };
        self.reaching.inside(process.number, || process.write_run(at, pieces))
    }

    /// In another process, atomic among the operations of this card only, as `IBV_ATOMIC_HCA` says.
    fn atomic(&mut self, memory: MemoryId, offset: u64, operation: Atomic) -> Result<u64, MemoryFault> {
        match &**self.get(memory)? {
            Reach::Mapped(block, _) => block.atomic(offset, operation),
            Reach::Process { process, address, length } => {
                let at = Reach::locate(*address, *length, offset, 8)?;
                self.reaching.inside(process.number, || {
                    let mut bytes = [0; 8];
                    process.read(at, &mut bytes)?;
                    let old = u64::from_ne_bytes(bytes);
                    process.write(at, &operation.apply(old).to_ne_bytes())?;
                    Ok(old)
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU8;

    /// This process, as one that the kernel does not let us into.
    fn closed() -> Process {
        let memory = File::options().read(true).write(true).open("/proc/self/mem").unwrap();
        let process = Process::new(std::process::id(), Some(memory));
        process.forbidden.store(true, Ordering::Relaxed);
        process
    }

    #[test]
    fn memory_is_reached_through_a_passed_descriptor() {
        let target: Vec<AtomicU64> = (0..8).map(AtomicU64::new).collect();
        let address = target.as_ptr() as u64;
        let process = closed();
        let bytes: Vec<u8> = (0..61).collect();
        process.write(address + 3, &bytes).unwrap();
        let mut back = [0; 61];
        process.read(address + 3, &mut back).unwrap();
        assert_eq!(back[..], bytes[..]);
        assert_eq!(target[1].load(Ordering::Relaxed).to_ne_bytes(), [5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!(process.read(8, &mut back), Err(MemoryFault), "nothing is mapped there");
        process.bury();
        assert_eq!(process.read(address, &mut back), Err(MemoryFault));
    }

    /// Two pages of this process, and one behind them that nobody may touch.
    fn pages() -> (u64, &'static [AtomicU8]) {
        let (flags, length) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, 3 * 4096);
        // SAFETY: a new mapping, which is never taken away.
        let base = unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let base = libc::mmap(std::ptr::null_mut(), length, rights, flags, -1, 0);
            assert_ne!(base, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(base.add(2 * 4096), 4096, libc::PROT_NONE), 0);
            base
        };
        // SAFETY: two readable and writable pages that live for ever, and bytes that anybody may change.
        (base as u64, unsafe { std::slice::from_raw_parts(base.cast(), 2 * 4096) })
    }

    #[test]
    fn what_several_packets_carry_is_moved_at_once() {
        let (address, bytes) = pages();
        let process = Process::new(std::process::id(), None);
        let sent: Vec<u8> = (0..3000u32).map(|at| at as u8).collect();
        let pieces: Vec<&[u8]> = sent.chunks(1001).collect();
        assert_eq!(process.write_run(address + 7, &pieces), 3);
        assert!(bytes[7..3007].iter().zip(&sent).all(|(byte, sent)| byte.load(Ordering::Relaxed) == *sent));
        let mut into = [0xee; 3 * 1020];
        assert!(process.read_run(address + 7, 3000, &mut into, 1001, 1020));
        for (piece, sent) in into.chunks(1020).zip(&pieces) {
            assert_eq!(piece[..sent.len()], **sent);
            assert!(
                piece[sent.len()..].iter().all(|byte| *byte == 0xee),
                "between the pieces nothing changes"
            );
        }
    }

    #[test]
    fn of_several_pieces_those_before_a_fault_are_in_place() {
        let (address, bytes) = pages();
        let process = Process::new(std::process::id(), None);
        let sent = [7; 4096];
        assert_eq!(process.write_run(address + 2048, &[&sent[..2048], &sent[..2048], &sent[..2048]]), 3);
        assert_eq!(process.write_run(address + 4096, &[&sent[..3000], &sent[..3000]]), 1);
        assert_eq!(bytes[4096 + 2999].load(Ordering::Relaxed), 7);
        assert!(!process.read_run(address + 4096, 6000, &mut [0; 6000], 3000, 3000));
        process.bury();
        assert_eq!(process.write_run(address, &[&sent[..8], &sent[..8]]), 0);
    }

    #[test]
    fn a_process_that_is_not_there_is_a_fault() {
        let nobody = Process::new(0x3fff_ffff, None);
        assert_eq!(nobody.read(4096, &mut [0; 4]), Err(MemoryFault));
        assert_eq!(nobody.write(4096, &[0; 4]), Err(MemoryFault));
    }
}
