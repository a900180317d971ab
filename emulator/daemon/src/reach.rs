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

    /// The last bytes are an access of their own, after all others: a word of eight or four if there is one. Fewer
    /// the kernel copies byte by byte, not always in order, so that the last byte goes alone.
    fn write(&self, address: u64, from: &[u8]) -> Result<(), MemoryFault> {
        self.is_alive()?;
        let tail = match from.len() {
            0 => return Ok(()),
            4 => 4,
            8.. => 8,
            _ => 1,
        };
        let (head, tail) = from.split_at(from.len() - tail);
        if let Some(memory) = self.passed() {
            let written = memory
                .write_all_at(head, address)
                .and_then(|()| memory.write_all_at(tail, address + head.len() as u64));
            return written.map_err(|_| MemoryFault);
        }
        let piece = |bytes: &[u8]| libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() };
        let place = |address: u64, length| libc::iovec { iov_base: address as *mut _, iov_len: length };
        let local = [piece(head), piece(tail)];
        let remote = [place(address, head.len()), place(address + head.len() as u64, tail.len())];
        // SAFETY: `local` is only read, and is `from`; the other side is checked by the kernel.
        let done =
            unsafe { libc::process_vm_writev(self.number as i32, local.as_ptr(), 2, remote.as_ptr(), 2, 0) };
        if done == from.len() as isize {
            return Ok(());
        }
        if self.is_forbidden(done) { self.write(address, from) } else { Err(MemoryFault) }
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
}

impl Memories {
    pub fn new(reaching: Arc<Reaching>) -> Memories {
        Memories { reaching, ..Memories::default() }
    }

    pub fn add(&mut self, reach: Arc<Reach>) -> MemoryId {
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
        if removed.is_some() {
            self.free.push(memory.0);
        }
        removed
    }

    pub fn get(&self, memory: MemoryId) -> Result<&Arc<Reach>, MemoryFault> {
        self.all.get(memory.0 as usize).and_then(Option::as_ref).ok_or(MemoryFault)
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

    #[test]
    fn a_process_that_is_not_there_is_a_fault() {
        let nobody = Process::new(0x3fff_ffff, None);
        assert_eq!(nobody.read(4096, &mut [0; 4]), Err(MemoryFault));
        assert_eq!(nobody.write(4096, &[0; 4]), Err(MemoryFault));
    }
}
