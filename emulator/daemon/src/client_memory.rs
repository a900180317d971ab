//! The memory of clients: mapped in the daemon, or accessed in the process of the client.

#![allow(unsafe_code)]

use crate::quota::MappingGuard;
use softhca_queue::{AtomicOperation, ExternalMemory, MemoryBlock, MemoryFault};
use softhca_types::AccessFlags;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The access to a client's memory that a host performs now. The stall watchdog reads it.
#[derive(Default)]
pub(crate) struct AccessMonitor {
    /// Odd during an access.
    serial: AtomicU64,
    pid: AtomicU32,
}

impl AccessMonitor {
    fn track<R>(&self, pid: u32, access: impl FnOnce() -> R) -> R {
        self.pid.store(pid, Ordering::Relaxed);
        self.serial.fetch_add(1, Ordering::Release);
        let result = access();
        self.serial.fetch_add(1, Ordering::Release);
        result
    }

    /// The access in progress: its number and the process.
    pub fn current(&self) -> Option<(u64, u32)> {
        let serial = self.serial.load(Ordering::Acquire);
        (serial % 2 == 1).then(|| (serial, self.pid.load(Ordering::Relaxed)))
    }
}

fn remote_iovec(address: u64, length: usize) -> libc::iovec {
    libc::iovec { iov_base: address as *mut _, iov_len: length }
}

fn local_iovec(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() }
}

/// Joins adjacent ranges, because the kernel looks up the pages of each range separately.
fn coalesce(ranges: &mut [libc::iovec]) -> &[libc::iovec] {
    let mut last = 0;
    for index in 1..ranges.len() {
        let next = ranges[index];
        let end = ranges[last].iov_base as usize + ranges[last].iov_len;
        if end == next.iov_base as usize {
            ranges[last].iov_len += next.iov_len;
        } else {
            last += 1;
            ranges[last] = next;
        }
    }
    &ranges[..ranges.len().min(last + 1)]
}

/// The number of last bytes that must become visible after all others: a word of eight or four bytes. The kernel
/// copies a shorter piece byte by byte in any order, so there the last byte is written separately.
fn ordered_tail_len(bytes: &[u8]) -> usize {
    match bytes.len() {
        0 => 0,
        4 => 4,
        8.. => 8,
        _ => 1,
    }
}

/// The memory of a running client process.
pub(crate) struct ProcessMemory {
    pid: u32,
    alive: AtomicBool,
    /// The kernel denies process_vm_readv and process_vm_writev.
    vm_access_denied: AtomicBool,
    /// /proc/self/mem, opened by the client: works where the kernel denies process_vm_readv and process_vm_writev.
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

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The process has exited: its number may be reused.
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
        // SAFETY: `local` is `into`, which nothing else refers to; the kernel checks the remote range.
        let done = unsafe { libc::process_vm_readv(self.pid as i32, &local, 1, &remote, 1, 0) };
        if done == into.len() as isize {
            return Ok(());
        }
        if self.check_vm_access_denied(done) { self.read(address, into) } else { Err(MemoryFault) }
    }

    /// Writes the last bytes after all others.
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
        let ranges =
            &mut [remote_iovec(address, head.len()), remote_iovec(address + head.len() as u64, tail.len())];
        let done = self.writev_ordered(&[local_iovec(head), local_iovec(tail)], ranges);
        if done == from.len() as isize {
            return Ok(());
        }
        if self.check_vm_access_denied(done) { self.write(address, from) } else { Err(MemoryFault) }
    }

    /// Writes the local pieces to the remote ranges in order. Returns the result of the system call. The vectors are
    /// undefined afterwards.
    fn writev_ordered(&self, pieces: &[libc::iovec], ranges: &mut [libc::iovec]) -> isize {
        let (local, count) = (pieces.as_ptr(), pieces.len() as libc::c_ulong);
        // The kernel copies each local piece separately, and x86-64 makes stores visible in order. Other processors
        // need the synchronization of the kernel between two remote ranges, so those are not joined.
        let ranges = if cfg!(target_arch = "x86_64") { coalesce(ranges) } else { ranges };
        let (remote, range_count) = (ranges.as_ptr(), ranges.len() as libc::c_ulong);
        // SAFETY: the kernel only reads the local pieces, which every caller keeps alive, and checks the remote ranges.
        unsafe { libc::process_vm_writev(self.pid as i32, local, count, remote, range_count, 0) }
    }

    /// The /proc/self/mem of the client, once the kernel has denied the other access.
    fn proc_mem_fallback(&self) -> Option<&File> {
        self.proc_mem.as_ref().filter(|_| self.vm_access_denied.load(Ordering::Relaxed))
    }

    /// Whether the kernel denied the access and /proc/self/mem is available.
    fn check_vm_access_denied(&self, done: isize) -> bool {
        let error = std::io::Error::last_os_error().raw_os_error();
        let forbidden =
            done < 0 && matches!(error, Some(libc::EPERM | libc::ENOSYS)) && self.proc_mem.is_some();
        if forbidden {
            self.vm_access_denied.store(true, Ordering::Relaxed);
        }
        forbidden
    }

    /// Checks that a range is mapped with the permissions that `access` needs.
    pub fn check_mapped(&self, address: u64, length: u64, access: AccessFlags) -> Result<(), String> {
        let end = address.checked_add(length).ok_or("the range exceeds the address space")?;
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid))
            .map_err(|error| format!("cannot read the mappings of process {}: {error}", self.pid))?;
        let mut at = address;
        for line in maps.lines() {
            let Some((range, permissions)) = line.split_once(' ') else { continue };
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
            if !permissions.starts_with('r') {
                return Err(format!("{at:#x} is mapped without read permission"));
            }
            if access.contains(AccessFlags::LOCAL_WRITE) && permissions.as_bytes().get(1) != Some(&b'w') {
                return Err(format!("local write access is requested, but {at:#x} is mapped read-only"));
            }
            at = to;
        }
        if at < end { Err(format!("{at:#x} is not mapped")) } else { Ok(()) }
    }
}

/// The memory of a region.
pub(crate) enum ClientMemory {
    Mapped(MappedMemory),
    Process(ProcessRange),
}

/// Memory that is mapped in the daemon.
pub(crate) struct MappedMemory {
    pub block: MemoryBlock,
    #[allow(dead_code, reason = "counted until it is dropped")]
    pub mapping_guard: MappingGuard,
}

/// Memory in the client's process.
pub(crate) struct ProcessRange {
    pub process: Arc<ProcessMemory>,
    pub monitor: Arc<AccessMonitor>,
    pub address: u64,
    pub length: u64,
}

impl ProcessRange {
    /// The address of a range of bytes in the process.
    fn locate(&self, offset: u64, length: usize) -> Result<u64, MemoryFault> {
        let end = offset.checked_add(length as u64).filter(|end| *end <= self.length);
        end.map(|_| self.address + offset).ok_or(MemoryFault)
    }
}

impl ClientMemory {
    /// The memory as an HCA knows it. Drop it without holding the lock of the driver, because unmapping takes time.
    pub fn into_block(self) -> Arc<MemoryBlock> {
        let length = match &self {
            ClientMemory::Mapped(mapped) => mapped.block.len(),
            ClientMemory::Process(range) => range.length as usize,
        };
        Arc::new(MemoryBlock::external(length, Box::new(self)))
    }
}

impl ExternalMemory for ClientMemory {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        match self {
            ClientMemory::Mapped(mapped) => mapped.block.read(offset, into),
            ClientMemory::Process(range) => {
                let at = range.locate(offset, into.len())?;
                range.monitor.track(range.process.pid, || range.process.read(at, into))
            }
        }
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        match self {
            ClientMemory::Mapped(mapped) => mapped.block.write(offset, from),
            ClientMemory::Process(range) => {
                let at = range.locate(offset, from.len())?;
                range.monitor.track(range.process.pid, || range.process.write(at, from))
            }
        }
    }

    /// In another process, atomic only with respect to other operations of this HCA (`IBV_ATOMIC_HCA`).
    fn atomic(&self, offset: u64, operation: AtomicOperation) -> Result<u64, MemoryFault> {
        match self {
            ClientMemory::Mapped(mapped) => mapped.block.atomic(offset, operation),
            ClientMemory::Process(range) => {
                let at = range.locate(offset, 8)?;
                range.monitor.track(range.process.pid, || {
                    let mut bytes = [0; 8];
                    range.process.read(at, &mut bytes)?;
                    let old = u64::from_ne_bytes(bytes);
                    range.process.write(at, &operation.apply(old).to_ne_bytes())?;
                    Ok(old)
                })
            }
        }
    }

    fn check_access(&self, access: AccessFlags) -> Result<(), String> {
        match self {
            ClientMemory::Mapped(_) => Ok(()),
            ClientMemory::Process(range) => range.process.check_mapped(range.address, range.length, access),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This process, as if the kernel denied process_vm_readv and process_vm_writev.
    fn vm_access_denied() -> ProcessMemory {
        let memory = File::options().read(true).write(true).open("/proc/self/mem").unwrap();
        let process = ProcessMemory::new(std::process::id(), Some(memory));
        process.vm_access_denied.store(true, Ordering::Relaxed);
        process
    }

    #[test]
    fn memory_is_accessed_through_proc_mem() {
        let target: Vec<AtomicU64> = (0..8).map(AtomicU64::new).collect();
        let address = target.as_ptr() as u64;
        let process = vm_access_denied();
        let bytes: Vec<u8> = (0..61).collect();
        process.write(address + 3, &bytes).unwrap();
        let mut back = [0; 61];
        process.read(address + 3, &mut back).unwrap();
        assert_eq!(back[..], bytes[..]);
        assert_eq!(target[1].load(Ordering::Relaxed).to_ne_bytes(), [5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!(process.read(8, &mut back), Err(MemoryFault), "the address is not mapped");
        process.mark_exited();
        assert_eq!(process.read(address, &mut back), Err(MemoryFault));
    }

    #[test]
    fn a_process_that_does_not_exist_is_a_fault() {
        let missing = ProcessMemory::new(0x3fff_ffff, None);
        assert_eq!(missing.read(4096, &mut [0; 4]), Err(MemoryFault));
        assert_eq!(missing.write(4096, &[0; 4]), Err(MemoryFault));
    }
}
