//! Objects that C programs hold pointers to.
//!
//! An object begins with the structure of the headers and ends with what we know of it. Its memory is never
//! given back: a destroyed object points to the dead context, whose verbs refuse, and is used again only after
//! many others were destroyed.

use crate::abi::ibv_context;
use crate::destroyed_context;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// How many destroyed objects of a kind wait before the oldest is used again.
const MAX_QUARANTINED: usize = 1024;

/// A kind of object: the structure `Abi` begins with a pointer to its context.
pub trait ObjectKind: Sized + 'static {
    /// The structure that programs see.
    type Abi;
    /// The destroyed ones, oldest first, by address.
    fn destroyed() -> &'static Mutex<VecDeque<usize>>;
}

/// Declares what is behind the structures that programs see.
macro_rules! kinds {
    ($($state:ty = $abi:ty;)*) => {
        $(impl $crate::object::ObjectKind for $state {
            type Abi = $abi;
            fn destroyed() -> &'static parking_lot::Mutex<std::collections::VecDeque<usize>> {
                static DESTROYED: parking_lot::Mutex<std::collections::VecDeque<usize>> =
                    parking_lot::Mutex::new(std::collections::VecDeque::new());
                &DESTROYED
            }
        })*
    };
}
pub(crate) use kinds;

#[repr(C)]
struct Object<K: ObjectKind> {
    abi: K::Abi,
    /// Null once the object is destroyed.
    state: AtomicPtr<K>,
}

/// Makes an object.
pub fn create<K: ObjectKind>(abi: K::Abi, state: K) -> *mut K::Abi {
    let object = Object { abi, state: AtomicPtr::new(Box::into_raw(Box::new(state))) };
    let reused = {
        let mut destroyed = K::destroyed().lock();
        if destroyed.len() > MAX_QUARANTINED { destroyed.pop_front() } else { None }
    };
    let place = match reused {
        Some(address) => {
            let place = address as *mut Object<K>;
            // SAFETY: it was made by the branch below, for this kind, and nobody has it any more.
            unsafe { place.write(object) };
            place
        }
        None => Box::into_raw(Box::new(object)),
    };
    place.cast()
}

/// Whether a pointer cannot be one of ours. perftest, refused once, goes on with one that never was.
fn is_not_an_object<K: ObjectKind>(object: *mut K::Abi) -> bool {
    object.is_null() || !object.cast::<Object<K>>().is_aligned()
}

/// What is behind an object; `None` if it was destroyed or is a pointer that cannot be one of ours.
///
/// # Safety
/// `object` is null or was made by [`create`] for this kind. While the result is used, no other thread destroys
/// it, as the manual pages ask for.
#[inline]
pub unsafe fn state<'a, K: ObjectKind>(object: *mut K::Abi) -> Option<&'a K> {
    if is_not_an_object::<K>(object) {
        return None;
    }
    // SAFETY: an object that was made once stays readable; its state is there until it is destroyed.
    unsafe { (*object.cast::<Object<K>>()).state.load(Ordering::Acquire).as_ref() }
}

/// Ends an object and returns what was behind it; `None` if somebody else did.
///
/// # Safety
/// As [`state`].
pub unsafe fn destroy<K: ObjectKind>(object: *mut K::Abi) -> Option<Box<K>> {
    if is_not_an_object::<K>(object) {
        return None;
    }
    // SAFETY: as in `state`.
    let state = unsafe { (*object.cast::<Object<K>>()).state.swap(null_mut(), Ordering::AcqRel) };
    if state.is_null() {
        return None;
    }
    // SAFETY: every structure begins with the pointer to its context.
    unsafe { *object.cast::<*mut ibv_context>() = destroyed_context::context() };
    K::destroyed().lock().push_back(object as usize);
    // SAFETY: it came from a box, and the swap made it ours.
    Some(unsafe { Box::from_raw(state) })
}
