//! The options of a socket.

use core::ffi::c_int;
use std::collections::BTreeMap;

/// Options by level and name, as the program wrote them.
pub type Options = BTreeMap<(c_int, c_int), Vec<u8>>;

pub const SOL_RDMA: c_int = 0x10000;
pub const RDMA_SQSIZE: c_int = 0;
pub const RDMA_RQSIZE: c_int = 1;
pub const RDMA_INLINE: c_int = 2;
pub const RDMA_IOMAPSIZE: c_int = 3;

/// The sizes of a connection, from socket options.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub send_buffer: usize,
    pub receive_buffer: usize,
    pub send_queue: u32,
    pub receive_queue: u32,
    /// Mappings that the peer may announce.
    pub iomaps: usize,
}

/// The default of an option that is supported.
pub fn default_option(level: c_int, name: c_int) -> Option<Vec<u8>> {
    let number: c_int = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_RCVBUF) => 1 << 18,
        (libc::SOL_SOCKET, libc::SO_LINGER) => return Some(vec![0; 8]),
        (libc::SOL_SOCKET, libc::SO_TYPE) => libc::SOCK_STREAM,
        (libc::SOL_SOCKET, libc::SO_REUSEADDR | libc::SO_KEEPALIVE | libc::SO_OOBINLINE) => 0,
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => 1,
        (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => 1024,
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE | libc::TCP_KEEPINTVL | libc::TCP_KEEPCNT) => 0,
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => 0,
        (SOL_RDMA, RDMA_SQSIZE | RDMA_RQSIZE) => 384,
        (SOL_RDMA, RDMA_INLINE) => 64,
        (SOL_RDMA, RDMA_IOMAPSIZE) => 0,
        _ => return None,
    };
    Some(number.to_ne_bytes().into())
}

fn number(options: &Options, level: c_int, name: c_int) -> usize {
    let bytes = options.get(&(level, name)).cloned().or_else(|| default_option(level, name));
    let bytes = bytes.and_then(|bytes| bytes.first_chunk().copied()).unwrap_or_default();
    c_int::from_ne_bytes(bytes).max(0) as usize
}

/// The sizes that the options ask for.
pub fn sizes(options: &Options) -> Sizes {
    let buffer = |name| number(options, libc::SOL_SOCKET, name).clamp(1 << 13, 1 << 26).next_multiple_of(64);
    let queue = |name| number(options, SOL_RDMA, name).clamp(8, 8192) as u32;
    Sizes {
        send_buffer: buffer(libc::SO_SNDBUF),
        receive_buffer: buffer(libc::SO_RCVBUF),
        send_queue: queue(RDMA_SQSIZE),
        receive_queue: queue(RDMA_RQSIZE),
        iomaps: number(options, SOL_RDMA, RDMA_IOMAPSIZE).min(1 << 14),
    }
}
