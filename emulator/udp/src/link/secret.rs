//! The secret from which a port derives the tokens of its peers.

use crate::PeerPort;
use softhca_wire::link_control::Token;
use std::fmt;
use std::hash::Hasher;
use std::net::IpAddr;

/// The key of one port. It exists only in the memory of its process, and every start has another one.
#[derive(Clone, Copy)]
pub struct LinkSecret([u64; 2]);

impl LinkSecret {
    /// A secret from the operating system's random number generator.
    ///
    /// # Panics
    /// If the operating system has none.
    pub fn from_system() -> LinkSecret {
        LinkSecret(crate::system::random_words())
    }

    /// A secret for tests that repeat a run.
    pub fn predictable(seed: u64) -> LinkSecret {
        LinkSecret([seed, !seed])
    }

    /// The token of a peer: SipHash-2-4 of its address and slot.
    pub fn token(&self, peer: PeerPort) -> Token {
        #[expect(
            deprecated,
            reason = "the standard library's SipHash-2-4 with a key; its successors choose their own key"
        )]
        let mut hasher = std::hash::SipHasher::new_with_keys(self.0[0], self.0[1]);
        match peer.address {
            IpAddr::V4(address) => hasher.write(&address.octets()),
            IpAddr::V6(address) => hasher.write(&address.octets()),
        }
        hasher.write(&peer.slot.to_ne_bytes());
        Token::new(hasher.finish())
    }
}

impl fmt::Debug for LinkSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LinkSecret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_depend_on_secret_address_and_slot() {
        let port = |last, slot| PeerPort { address: IpAddr::from([127, 0, 0, last]), slot };
        let (one, other) = (LinkSecret::from_system(), LinkSecret::from_system());
        let tokens =
            [one.token(port(2, 0)), one.token(port(3, 0)), one.token(port(2, 1)), other.token(port(2, 0))];
        for (index, token) in tokens.iter().enumerate() {
            assert!(!tokens[..index].contains(token), "{tokens:?}");
        }
        assert_eq!(one.token(port(2, 0)), tokens[0]);
        assert_eq!(format!("{one:?}"), "LinkSecret", "a log does not show the key");
    }
}
