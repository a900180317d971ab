//! The memory of clients, as the card reaches it: mapped here, or in the client's own process.

#![allow(unsafe_code)]

use crate::quota::MappingGuard;
use softhca_engine::{AtomicOperation, Memory, MemoryFault, MemoryId, MemoryLocation};
use softhca_queue::{AccessFlags, MemoryBlock};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// What a host's card is reaching for now, for whoever watches that it comes back.
#[derive(Default)]
pub(crate) struct AccessMonitor {
    /// Odd while the card is inside of a process.
    serial: AtomicU64,
    pid: AtomicU32,
}

impl AccessMonitor {
    fn track<R>(&self, process: u32, act: impl FnOnce() -> R) -> R {
        self.pid.store(process, Ordering::Relaxed);
        self.serial.fetch_add(1, Ordering::Release);
        let result = act();
        self.serial.fetch_add(1, Ordering::Release);
        result
    }

    /// The access that is under way: its number and the process.
    pub fn current(&self) -> Option<(u64, u32)> {
        let serial = self.serial.load(Ordering::Acquire);
        (serial % 2 == 1).then(|| (serial, self.pid.load(Ordering::Relaxed)))
    }
}

/// The most packets whose payload one call of the kernel copies.
const MAX_PACKETS: usize = 64;

const EMPTY: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

fn remote_iovec(address: u64, length: usize) -> libc::iovec {
    libc::iovec { iov_base: address as *mut _, iov_len: length }
}

fn local_iovec(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() }
}

/// Makes one of places that follow each other: the kernel looks for the pages of each by itself.
fn coalesce(places: &mut [libc::iovec]) -> &[libc::iovec] {
    let mut last = 0;
    for index in 1..places.len() {
        let next = places[index];
        let end = places[last].iov_base as usize + places[last].iov_len;
        if end == next.iov_base as usize {
            places[last].iov_len += next.iov_len;
        } else {
            last += 1;
            places[last] = next;
        }
    }
    &places[..places.len().min(last + 1)]
}

/// How many of the last bytes are to be seen after all others: a word of eight or four if there is one. Fewer the
/// kernel copies byte by byte, not always in order, so that the last byte goes alone.
fn ordered_tail_len(bytes: &[u8]) -> usize {
    match bytes.len() {
        0 => 0,
        4 => 4,
        8.. => 8,
        _ => 1,
    }
}

/// A process whose memory is reached, while it lives.
pub(crate) struct ProcessMemory {
    pid: u32,
    alive: AtomicBool,
    /// The kernel does not let us in with process_vm_*.
    vm_access_denied: AtomicBool,
    /// /proc/self/mem of the client, opened by itself: works where the kernel refuses process_vm_*.
    proc_mem: Option<File>,
}

impl ProcessMemory {
    pub fn new(number: u32, memory: Option<File>) -> ProcessMemory {
        ProcessMemory {
            pid: number,
            alive: AtomicBool::new(true),
            vm_access_denied: AtomicBool::new(false),
            proc_mem: memory,
        }
    }

    /// It is gone: its number may soon be another's.
    pub fn mark_exited(&self) {
        self.alive.store(false, Ordering::Release);
    }

    fn check_alive(&self) -> Result<(), MemoryFault> {
        if self.alive.load(Ordering::Acquire) { Ok(()) } else { Err(MemoryFault) }
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.check_alive()?;
        if into.is_empty() {
            return Ok(());
        }
        if let Some(memory) = self.proc_mem_fallback() {
            return memory.read_exact_at(into, address).map_err(|_| MemoryFault);
        }
        let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: into.len() };
        // SAFETY: `local` is `into`, which is ours alone; the other side is checked by the kernel.
        let done = unsafe { libc::process_vm_readv(self.pid as i32, &local, 1, &remote, 1, 0) };
        if done == into.len() as isize {
            return Ok(());
        }
        if self.check_vm_access_denied(done) { self.read(address, into) } else { Err(MemoryFault) }
    }

    /// The last bytes are an access of their own, after all others.
    fn write(&self, address: u64, from: &[u8]) -> Result<(), MemoryFault> {
        self.check_alive()?;
        if from.is_empty() {
            return Ok(());
        }
        let (head, tail) = from.split_at(from.len() - ordered_tail_len(from));
        if let Some(memory) = self.proc_mem_fallback() {
            let written = memory
                .write_all_at(head, address)
                .and_then(|()| memory.write_all_at(tail, address + head.len() as u64));
            return written.map_err(|_| MemoryFault);
        }
        let places =
            &mut [remote_iovec(address, head.len()), remote_iovec(address + head.len() as u64, tail.len())];
        let done = self.writev_ordered(&[local_iovec(head), local_iovec(tail)], places);
        if done == from.len() as isize {
            return Ok(());
        }
        if self.check_vm_access_denied(done) { self.write(address, from) } else { Err(MemoryFault) }
    }

    /// Stores pieces at their places, each after those before it. Returns what the kernel says. The vectors are of use
    /// to nobody afterwards.
    fn writev_ordered(&self, pieces: &[libc::iovec], places: &mut [libc::iovec]) -> isize {
        let (local, count) = (pieces.as_ptr(), pieces.len() as libc::c_ulong);
        // Each piece is a copy of its own, and a strongly ordered processor shows copies in their order. Others
        // need what the kernel does between two places.
        let places = if cfg!(target_arch = "x86_64") { coalesce(places) } else { places };
        let (remote, spans) = (places.as_ptr(), places.len() as libc::c_ulong);
        // SAFETY: the pieces are only read and their bytes outlive the call, as every caller sees to; the other side
        // is checked by the kernel.
        unsafe { libc::process_vm_writev(self.pid as i32, local, count, remote, spans, 0) }
    }

    /// As [`Process::read`] for each place, each `stride` bytes behind the one before in `into`. False if there is no
    /// way, or not for all of it.
    fn read_batch(&self, places: &[(u64, usize)], into: &mut [u8], stride: usize) -> bool {
        if self.check_alive().is_err() || self.proc_mem_fallback().is_some() || places.len() > MAX_PACKETS {
            return false;
        }
        let (mut local, mut remote) = ([EMPTY; MAX_PACKETS], [EMPTY; MAX_PACKETS]);
        let (mut count, mut length) = (0, 0);
        for (bytes, (address, size)) in into.chunks_mut(stride).zip(places) {
            let Some(bytes) = bytes.get_mut(..*size) else { return false };
            local[count] = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
            remote[count] = remote_iovec(*address, *size);
            (count, length) = (count + 1, length + size);
        }
        if count != places.len() {
            return false;
        }
        let remote = coalesce(&mut remote[..count]);
        let (local, spans) = (local.as_ptr(), remote.len() as libc::c_ulong);
        let (count, remote) = (count as libc::c_ulong, remote.as_ptr());
        // SAFETY: `local` are pieces of `into`, which is ours alone; the other side is checked by the kernel.
        let done = unsafe { libc::process_vm_readv(self.pid as i32, local, count, remote, spans, 0) };
        done == length as isize
    }

    /// As [`Process::write`] for each piece. Returns how many are in place, from the first.
    fn write_batch(&self, addresses: &[u64], pieces: &[&[u8]]) -> usize {
        if self.check_alive().is_err() || self.proc_mem_fallback().is_some() {
            return 0;
        }
        let (mut local, mut remote) = ([EMPTY; 2 * MAX_PACKETS], [EMPTY; 2 * MAX_PACKETS]);
        let pieces = &pieces[..pieces.len().min(MAX_PACKETS)];
        let pairs = local.chunks_mut(2).zip(remote.chunks_mut(2));
        for ((local, remote), (address, bytes)) in pairs.zip(addresses.iter().zip(pieces)) {
            let (head, tail) = bytes.split_at(bytes.len() - ordered_tail_len(bytes));
            (local[0], local[1]) = (local_iovec(head), local_iovec(tail));
            let end = address + head.len() as u64;
            (remote[0], remote[1]) = (remote_iovec(*address, head.len()), remote_iovec(end, tail.len()));
        }
        let parts = 2 * pieces.len();
        let done = self.writev_ordered(&local[..parts], &mut remote[..parts]);
        let mut left = usize::try_from(done).unwrap_or(0);
        let is_whole = |piece: &&&[u8]| {
            let fits = piece.len() <= left;
            left -= piece.len().min(left);
            fits
        };
        pieces.iter().take_while(is_whole).count()
    }

    /// The client's own descriptor, once it is known to be the only way in.
    fn proc_mem_fallback(&self) -> Option<&File> {
        self.proc_mem.as_ref().filter(|_| self.vm_access_denied.load(Ordering::Relaxed))
    }

    /// Whether the kernel just refused to let us into the process at all, and there is another way.
    fn check_vm_access_denied(&self, done: isize) -> bool {
        let error = std::io::Error::last_os_error().raw_os_error();
        let forbidden =
            done < 0 && matches!(error, Some(libc::EPERM | libc::ENOSYS)) && self.proc_mem.is_some();
        if forbidden {
            self.vm_access_denied.store(true, Ordering::Relaxed);
        }
        forbidden
    }

    /// Whether all of a range is mapped with the rights that `access` needs.
    pub fn check_mapped(&self, address: u64, length: u64, access: AccessFlags) -> Result<(), String> {
        let end = address.checked_add(length).ok_or("the range ends beyond the address space")?;
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid))
            .map_err(|error| format!("the mappings of process {} cannot be read: {error}", self.pid))?;
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
            if access.contains(AccessFlags::LOCAL_WRITE) && rest.as_bytes().get(1) != Some(&b'w') {
                return Err(format!("local write is asked for, but {at:#x} is mapped read-only"));
            }
            at = to;
        }
        if at < end { Err(format!("nothing is mapped at {at:#x}")) } else { Ok(()) }
    }
}

/// The memory behind one region: mapped here, in the client's process, or there with a part that is mapped here too.
pub(crate) struct ClientMemory {
    pub mapped: Option<MappedMemory>,
    pub process: Option<ProcessRange>,
}

/// What is mapped here.
pub(crate) struct MappedMemory {
    pub block: MemoryBlock,
    /// Where it begins in the region.
    pub offset: u64,
    #[allow(dead_code, reason = "counts while it lives")]
    pub mapping_guard: MappingGuard,
}

/// What is in the client's process.
pub(crate) struct ProcessRange {
    pub process: Arc<ProcessMemory>,
    pub address: u64,
    pub length: u64,
}

/// How a range is reached.
enum AccessMethod<'a> {
    /// At this offset of what is mapped here.
    Mapped(&'a MemoryBlock, u64),
    /// At this address of a process.
    Process(&'a ProcessMemory, u64),
}

impl ClientMemory {
    fn is_process_only(&self) -> bool {
        self.mapped.is_none()
    }

    #[inline]
    fn access_method(&self, offset: u64, length: usize) -> Result<AccessMethod<'_>, MemoryFault> {
        let end = offset.checked_add(length as u64).ok_or(MemoryFault)?;
        if let Some(near) = &self.mapped
            && offset >= near.offset
            && end - near.offset <= near.block.len() as u64
        {
            return Ok(AccessMethod::Mapped(&near.block, offset - near.offset));
        }
        match &self.process {
            Some(far) if end <= far.length => Ok(AccessMethod::Process(&far.process, far.address + offset)),
            _ => Err(MemoryFault),
        }
    }
}

/// The memory of all clients of a host.
#[derive(Default)]
pub(crate) struct ClientMemories {
    monitor: Arc<AccessMonitor>,
    regions: Vec<Option<Arc<ClientMemory>>>,
    free: Vec<u32>,
    /// How many of them are in processes.
    process_only: usize,
}

impl ClientMemories {
    pub fn new(reaching: Arc<AccessMonitor>) -> ClientMemories {
        ClientMemories { monitor: reaching, ..ClientMemories::default() }
    }

    pub fn add(&mut self, reach: Arc<ClientMemory>) -> MemoryId {
        self.process_only += usize::from(reach.is_process_only());
        match self.free.pop() {
            Some(index) => {
                self.regions[index as usize] = Some(reach);
                MemoryId(index)
            }
            None => {
                self.regions.push(Some(reach));
                MemoryId(self.regions.len() as u32 - 1)
            }
        }
    }

    /// Takes one out. Let it go outside of the lock: unmapping takes time.
    pub fn remove(&mut self, memory: MemoryId) -> Option<Arc<ClientMemory>> {
        let removed = self.regions.get_mut(memory.0 as usize)?.take();
        if let Some(reach) = &removed {
            self.process_only -= usize::from(reach.is_process_only());
            self.free.push(memory.0);
        }
        removed
    }

    pub fn get(&self, memory: MemoryId) -> Result<&Arc<ClientMemory>, MemoryFault> {
        self.regions.get(memory.0 as usize).and_then(Option::as_ref).ok_or(MemoryFault)
    }

    /// The process that places are in, and how many of them, from the first, are in one. Each address is told.
    fn common_process(
        &self,
        places: &[MemoryLocation],
        mut tell: impl FnMut(usize, u64),
    ) -> Option<(&ProcessMemory, usize)> {
        let mut found: Option<&ProcessMemory> = None;
        let mut count = 0;
        for place in places.iter().take(MAX_PACKETS) {
            let Ok(AccessMethod::Process(process, at)) =
                self.get(place.memory).and_then(|reach| reach.access_method(place.offset, place.length))
            else {
                break;
            };
            if found.is_some_and(|found| !std::ptr::eq(found, process)) {
                break;
            }
            found = Some(process);
            tell(count, at);
            count += 1;
        }
        Some((found?, count))
    }
}

impl Memory for ClientMemories {
    fn read(&self, memory: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        match self.get(memory)?.access_method(offset, into.len())? {
            AccessMethod::Mapped(block, at) => block.read(at, into),
            AccessMethod::Process(process, at) => self.monitor.track(process.pid, || process.read(at, into)),
        }
    }

    fn write(&mut self, memory: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        match self.get(memory)?.access_method(offset, from.len())? {
            AccessMethod::Mapped(block, at) => block.write(at, from),
            AccessMethod::Process(process, at) => self.monitor.track(process.pid, || process.write(at, from)),
        }
    }

    fn prefers_batches(&self) -> bool {
        self.process_only > 0
    }

    fn read_batch(&self, places: &[MemoryLocation], into: &mut [u8], stride: usize) -> bool {
        let mut addresses = [(0, 0); MAX_PACKETS];
        let Some((process, count)) = self.common_process(places, |index, address| {
            addresses[index] = (address, places[index].length);
        }) else {
            return false;
        };
        count == places.len()
            && self.monitor.track(process.pid, || process.read_batch(&addresses[..count], into, stride))
    }

    fn write_batch(&mut self, places: &[MemoryLocation], from: &[&[u8]]) -> usize {
        let mut addresses = [0; MAX_PACKETS];
        let Some((process, count)) = self.common_process(places, |index, address| addresses[index] = address)
        else {
            return 0;
        };
        self.monitor.track(process.pid, || process.write_batch(&addresses[..count], &from[..count]))
    }

    /// In another process, atomic among the operations of this card only, as `IBV_ATOMIC_HCA` says.
    fn atomic(
        &mut self,
        memory: MemoryId,
        offset: u64,
        operation: AtomicOperation,
    ) -> Result<u64, MemoryFault> {
        match self.get(memory)?.access_method(offset, 8)? {
            AccessMethod::Mapped(block, at) => block.atomic(at, operation),
            AccessMethod::Process(process, at) => self.monitor.track(process.pid, || {
                let mut bytes = [0; 8];
                process.read(at, &mut bytes)?;
                let old = u64::from_ne_bytes(bytes);
                process.write(at, &operation.apply(old).to_ne_bytes())?;
                Ok(old)
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU8;

    /// This process, as one that the kernel does not let us into.
    fn closed() -> ProcessMemory {
        let memory = File::options().read(true).write(true).open("/proc/self/mem").unwrap();
        let process = ProcessMemory::new(std::process::id(), Some(memory));
        process.vm_access_denied.store(true, Ordering::Relaxed);
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
        process.mark_exited();
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
        let process = ProcessMemory::new(std::process::id(), None);
        let sent: Vec<u8> = (0..3000u32).map(|at| at as u8).collect();
        let pieces: Vec<&[u8]> = sent.chunks(1001).collect();
        let addresses = [0, 1001, 2002].map(|offset| address + 7 + offset);
        assert_eq!(process.write_batch(&addresses, &pieces), 3);
        assert!(bytes[7..3007].iter().zip(&sent).all(|(byte, sent)| byte.load(Ordering::Relaxed) == *sent));
        let mut into = [0xee; 3 * 1020];
        let places = [(addresses[0], 1001), (addresses[1], 1001), (addresses[2], 998)];
        assert!(process.read_batch(&places, &mut into, 1020));
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
        let process = ProcessMemory::new(std::process::id(), None);
        let sent = [7; 4096];
        let write = |offsets: &[u64], sizes: &[usize]| {
            let addresses: Vec<u64> = offsets.iter().map(|offset| address + offset).collect();
            let pieces: Vec<&[u8]> = sizes.iter().map(|size| &sent[..*size]).collect();
            process.write_batch(&addresses, &pieces)
        };
        assert_eq!(write(&[2048, 4096, 6144], &[2048; 3]), 3);
        assert_eq!(write(&[4096, 7096], &[3000; 2]), 1);
        assert_eq!(write(&[16, 5000, 8192, 32], &[16; 4]), 2);
        assert_eq!(bytes[4096 + 2999].load(Ordering::Relaxed), 7);
        assert_eq!([31, 32, 5015].map(|at| bytes[at].load(Ordering::Relaxed)), [7, 0, 7]);
        let places = [(address + 4096, 3000), (address + 7096, 3000)];
        assert!(!process.read_batch(&places, &mut [0; 6000], 3000));
        process.mark_exited();
        assert_eq!(write(&[0, 8], &[8; 2]), 0);
    }

    #[test]
    fn a_process_that_is_not_there_is_a_fault() {
        let nobody = ProcessMemory::new(0x3fff_ffff, None);
        assert_eq!(nobody.read(4096, &mut [0; 4]), Err(MemoryFault));
        assert_eq!(nobody.write(4096, &[0; 4]), Err(MemoryFault));
    }
}
