//! Objects that C programs hold pointers to.
//!
//! An object consists of the structure of the C headers and the state of this library. Its memory is never freed. A
//! destroyed object points to the destroyed context, whose verbs fail. The memory is reused only after many other
//! objects have been destroyed.

use crate::context::ContextHandle;
use crate::errno::Rejection;
use parking_lot::Mutex;
use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ops::Deref;
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
    fn identity(abi: &Self::Abi) -> Option<(ContextHandle, u32)>;
    /// The destroyed objects by address, oldest first.
    fn destroyed() -> &'static Mutex<VecDeque<usize>>;
}

/// Declares the states behind the structures of the C headers.
macro_rules! kinds {
    ($($state:ty = $abi:ty, $name:literal, $identity:expr;)*) => {
        $(impl $crate::object::ObjectKind for $state {
            type Abi = $abi;
            const NAME: &'static str = $name;
            fn identity(abi: &$abi) -> Option<($crate::context::ContextHandle, u32)> {
                let identity: fn(&$abi) -> Option<($crate::context::ContextHandle, u32)> = $identity;
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
    abi: UnsafeCell<K::Abi>,
    /// Null once the object is destroyed.
    state: AtomicPtr<K>,
    /// The value of [`ObjectKind::identity`] at creation.
    identity: Option<(ContextHandle, u32)>,
}

/// A pointer to an object, as programs pass it: null, or a result of [`create`].
#[repr(transparent)]
pub struct Handle<K: ObjectKind>(*mut K::Abi);

impl<K: ObjectKind> Clone for Handle<K> {
    fn clone(&self) -> Handle<K> {
        *self
    }
}

impl<K: ObjectKind> Copy for Handle<K> {}

impl<K: ObjectKind> PartialEq for Handle<K> {
    fn eq(&self, other: &Handle<K>) -> bool {
        self.0 == other.0
    }
}

// SAFETY: the state of an object is that of a Rust object that threads share.
unsafe impl<K: ObjectKind + Sync> Send for Handle<K> {}
// SAFETY: as above.
unsafe impl<K: ObjectKind + Sync> Sync for Handle<K> {}

impl<K: ObjectKind> Handle<K> {
    pub const NULL: Handle<K> = Handle(null_mut());

    /// # Safety
    /// `pointer` is null or came from [`create`] for this kind.
    pub unsafe fn from_ptr(pointer: *mut K::Abi) -> Handle<K> {
        Handle(pointer)
    }

    pub fn as_ptr(self) -> *mut K::Abi {
        self.0
    }

    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The object, unless it is destroyed or the pointer cannot be one. After a failed call, perftest continues with a
    /// pointer that never was one.
    #[inline]
    pub fn get<'a>(self) -> Option<Found<'a, K>> {
        let object = self.0.cast::<Object<K>>();
        if object.is_null() || !object.is_aligned() {
            return None;
        }
        // SAFETY: a created object stays readable; its state exists until it is destroyed, and programs do not destroy
        // objects that they use, as the manual pages require.
        unsafe {
            let state = (*object).state.load(Ordering::Acquire).as_ref()?;
            Some(Found { object: &*object, state })
        }
    }

    /// The object that a program passes to a verb, or why it is rejected.
    #[inline]
    pub fn find<'a>(self) -> Result<Found<'a, K>, Rejection> {
        let found = self.get().filter(|found| K::identity(found.abi()) == found.object.identity);
        found.ok_or_else(|| self.describe_misuse())
    }

    /// The object that a program passes to a verb of the data path, or why it is rejected. As on cards, these verbs
    /// ignore the fields that programs see.
    #[inline]
    pub fn find_on_data_path<'a>(self) -> Result<Found<'a, K>, Rejection> {
        self.get().ok_or_else(|| self.describe_misuse())
    }

    /// Why a verb cannot use the object.
    #[cold]
    fn describe_misuse(self) -> Rejection {
        let (name, object) = (K::NAME, self.0.cast::<Object<K>>());
        let Some(found) = self.get() else {
            return match object.is_null() || !object.is_aligned() {
                true => Rejection::invalid(format!("{object:p} is not a {name}")),
                false => Rejection::invalid(format!("the {name} was destroyed")),
            };
        };
        // The kernel looks the handle up in the table of the context, and finds nothing.
        let changed = match (K::identity(found.abi()), found.object.identity) {
            (Some((_, now)), Some((_, created))) if now != created => {
                format!("no {name} has handle {now:#x}: the program has changed it from {created:#x}")
            }
            _ => format!("the program has changed the field `context` of the {name}"),
        };
        Rejection::new(libc::ENOENT, changed)
    }
}

/// An object that exists. Dereferences to its state.
pub struct Found<'a, K: ObjectKind> {
    object: &'a Object<K>,
    state: &'a K,
}

impl<K: ObjectKind> Deref for Found<'_, K> {
    type Target = K;
    fn deref(&self) -> &K {
        self.state
    }
}

impl<'a, K: ObjectKind> Found<'a, K> {
    /// The pointer that programs hold.
    pub fn as_ptr(&self) -> *mut K::Abi {
        self.object.abi.get()
    }

    /// The structure that programs see.
    pub fn abi(&self) -> &'a K::Abi {
        // SAFETY: programs do not use an object while they change its fields.
        unsafe { &*self.object.abi.get() }
    }

    /// Changes fields that programs see.
    pub fn update(&self, change: impl FnOnce(&mut K::Abi)) {
        // SAFETY: nothing here keeps references to these fields, and programs do not read them during a call that
        // changes them.
        change(unsafe { &mut *self.object.abi.get() });
    }

    /// Destroys the object. Returns its state, unless another call has destroyed it.
    pub fn destroy(self) -> Option<Box<K>> {
        let state = self.object.state.swap(null_mut(), Ordering::AcqRel);
        if state.is_null() {
            return None;
        }
        let object = self.object.abi.get();
        // SAFETY: every structure begins with the pointer to its context.
        unsafe { *object.cast::<ContextHandle>() = ContextHandle::destroyed() };
        K::destroyed().lock().push_back(object as usize);
        // SAFETY: it came from a box, and the swap made it ours.
        Some(unsafe { Box::from_raw(state) })
    }
}

/// Creates an object.
pub fn create<K: ObjectKind>(abi: K::Abi, state: K) -> Handle<K> {
    let identity = K::identity(&abi);
    let state = AtomicPtr::new(Box::into_raw(Box::new(state)));
    let object = Object { abi: UnsafeCell::new(abi), state, identity };
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
    Handle(target.cast())
}
