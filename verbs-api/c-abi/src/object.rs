//! Objects that C programs hold pointers to.
//!
//! An object consists of the structure of the C headers and the state of this library. Its memory is never freed. A
//! destroyed object points to the destroyed context, whose verbs fail. The memory is reused only after many other
//! objects have been destroyed.

use crate::abi::ibv_context;
use crate::destroyed_context;
use crate::errno::Rejection;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// How many destroyed objects of a kind are kept before the oldest is reused.
const MAX_QUARANTINED: usize = 1024;

/// A kind of object: the structure `Abi` begins with a pointer to its context.
pub trait ObjectKind: Sized + 'static {
    /// The structure that programs see.
    type Abi;
    /// Its name in explanations.
    const NAME: &'static str;
    /// The context and the handle in the structure, if it has them: programs must not change them.
    fn identity(abi: &Self::Abi) -> Option<(*mut ibv_context, u32)>;
    /// The destroyed objects by address, oldest first.
    fn destroyed() -> &'static Mutex<VecDeque<usize>>;
}

/// Declares the states behind the structures of the C headers.
macro_rules! kinds {
    ($($state:ty = $abi:ty, $name:literal, $identity:expr;)*) => {
        $(impl $crate::object::ObjectKind for $state {
            type Abi = $abi;
            const NAME: &'static str = $name;
            fn identity(abi: &$abi) -> Option<(*mut $crate::abi::ibv_context, u32)> {
                let identity: fn(&$abi) -> Option<(*mut $crate::abi::ibv_context, u32)> = $identity;
                identity(abi)
            }
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
    /// The value of [`ObjectKind::identity`] at creation.
    identity: Option<(*mut ibv_context, u32)>,
}

/// Creates an object.
pub fn create<K: ObjectKind>(abi: K::Abi, state: K) -> *mut K::Abi {
    let identity = K::identity(&abi);
    let object = Object { abi, state: AtomicPtr::new(Box::into_raw(Box::new(state))), identity };
    let reused = {
        let mut destroyed = K::destroyed().lock();
        if destroyed.len() > MAX_QUARANTINED { destroyed.pop_front() } else { None }
    };
    let target = match reused {
        Some(address) => {
            let target = address as *mut Object<K>;
            // SAFETY: the branch below created it for this kind, and it has no user any more.
            unsafe { target.write(object) };
            target
        }
        None => Box::into_raw(Box::new(object)),
    };
    target.cast()
}

/// Whether a pointer cannot be an object. After a failed call, perftest continues with a pointer that never was one.
fn is_not_an_object<K: ObjectKind>(object: *mut K::Abi) -> bool {
    object.is_null() || !object.cast::<Object<K>>().is_aligned()
}

/// The state of an object; `None` if it is destroyed or the pointer cannot be an object.
///
/// # Safety
/// `object` is null or was created by [`create`] for this kind. While the result is used, no other thread destroys
/// it, as the manual pages require.
#[inline]
pub unsafe fn state<'a, K: ObjectKind>(object: *mut K::Abi) -> Option<&'a K> {
    if is_not_an_object::<K>(object) {
        return None;
    }
    // SAFETY: a created object stays readable; its state exists until it is destroyed.
    unsafe { (*object.cast::<Object<K>>()).state.load(Ordering::Acquire).as_ref() }
}

/// The state of the object that a program passes to a verb of the data path, or why it is rejected. As on cards, these
/// verbs ignore the fields that programs see.
///
/// # Safety
/// As [`state`].
#[inline]
pub unsafe fn find_on_data_path<'a, K: ObjectKind>(object: *mut K::Abi) -> Result<&'a K, Rejection> {
    // SAFETY: the caller guarantees it.
    unsafe { state::<K>(object).ok_or_else(|| describe_misuse::<K>(object)) }
}

/// The state of the object that a program passes to a verb, or why it is rejected.
///
/// # Safety
/// As [`state`].
#[inline]
pub unsafe fn find<'a, K: ObjectKind>(object: *mut K::Abi) -> Result<&'a K, Rejection> {
    // SAFETY: the caller guarantees it.
    if let Some(state) = unsafe { state::<K>(object) } {
        // SAFETY: it has a state, so it is an object.
        let object = unsafe { &*object.cast::<Object<K>>() };
        if K::identity(&object.abi) == object.identity {
            return Ok(state);
        }
    }
    // SAFETY: the caller guarantees it.
    Err(unsafe { describe_misuse::<K>(object) })
}

/// Why a pointer is no object that a verb can use.
#[cold]
unsafe fn describe_misuse<K: ObjectKind>(object: *mut K::Abi) -> Rejection {
    let name = K::NAME;
    if is_not_an_object::<K>(object) {
        return Rejection::invalid(format!("{object:p} is not a {name}"));
    }
    // SAFETY: a created object stays readable.
    let object = unsafe { &*object.cast::<Object<K>>() };
    if object.state.load(Ordering::Acquire).is_null() {
        return Rejection::invalid(format!("the {name} was destroyed"));
    }
    // The kernel looks the handle up in the table of the context, and finds nothing.
    let changed = match (K::identity(&object.abi), object.identity) {
        (Some((_, now)), Some((_, created))) if now != created => {
            format!(
                "no {name} has handle {now:#x}: the program has changed its `handle`, which was {created:#x}"
            )
        }
        _ => format!(
            "the program has changed the field `context` of the {name}: the other context has no such {name}"
        ),
    };
    Rejection::new(libc::ENOENT, changed)
}

/// Destroys an object and returns its state; `None` if another call has destroyed it.
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
