//! The client for asynchronous programs, independent of the runtime.
//!
//! ```
//! # #![allow(dead_code)]
//! # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/daemon/fake.rs"));
//! # fn block_on<T>(future: impl Future<Output = T>) -> T {
//! #     let mut future = std::pin::pin!(future);
//! #     let mut context = std::task::Context::from_waker(std::task::Waker::noop());
//! #     loop {
//! #         if let std::task::Poll::Ready(done) = future.as_mut().poll(&mut context) { return done }
//! #         thread::yield_now();
//! #     }
//! # }
//! use blobd_client::asynchronous::AsyncClient;
//!
//! async fn first_bytes(client: &AsyncClient) -> Result<Vec<u8>, blobd_client::error::ClientError> {
//!     let model = client.open(&"llama3:8b".parse().expect("a name")).await?;
//!     // Mapping only reserves address space, so it does not block.
//!     Ok(model.map("token_embd.weight")?[..8].to_vec())
//! }
//! # fn main() {
//! #     let mut fake = FakeModel::new();
//! #     let fd = fake.add_file(&[7; 64]);
//! #     fake.add_tensor("token_embd.weight", Some(fd), 0, 64);
//! #     let fake = Arc::new(fake);
//! #     let client = AsyncClient::new(client_of(move |call| fake.serve(call)));
//! #     assert_eq!(block_on(first_bytes(&client)).unwrap(), [7; 8]);
//! # }
//! ```
//!
//! Each request runs on its own thread, so no runtime or dependency is needed. A thread costs about one
//! hundredth of an `open`, much of which is mapping, which would block a runtime's worker anyway.
//! Reading a map may block on the disk: call [`prefetch`](crate::model::BlobSlice::prefetch) first,
//! through [`AsyncClient::run`].

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;

use blobd_store_format::reference::Reference;

use crate::client::Client;
use crate::error::ClientError;
use crate::model::OpenModel;
use crate::protocol::event::Event;
use crate::protocol::request::OpenParams;
use crate::protocol::response::SessionList;
use crate::protocol::route::routes;
use crate::protocol::{access, event, naming, pull, push, request, response, signatures, space, upkeep};

/// An asynchronous client of a daemon.
#[derive(Clone, Debug)]
pub struct AsyncClient {
    client: Client,
}

impl AsyncClient {
    /// Wraps a client, with its timeout.
    pub const fn new(client: Client) -> Self {
        Self { client }
    }

    /// Connects to the default daemon.
    pub async fn connect_default() -> Result<Self, ClientError> {
        Pending::start(Client::connect_default).await?.map(Self::new)
    }

    /// The blocking client.
    pub const fn blocking(&self) -> &Client {
        &self.client
    }

    /// Runs `work` with the blocking client on a thread. Dropping the future discards the result; `work`
    /// still runs to its end.
    ///
    /// # Errors
    /// Those of `work`; [`ClientError::Io`] when no thread can be started or `work` panics.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Client) -> Result<T, ClientError> + Send + 'static,
    ) -> Result<T, ClientError> {
        let client = self.client.clone();
        Pending::start(move || work(&client)).await?
    }

    /// As [`Client::sessions`].
    pub async fn sessions(&self) -> Result<SessionList, ClientError> {
        self.run(Client::sessions).await
    }

    /// As [`Client::open`].
    pub async fn open(&self, reference: &Reference) -> Result<OpenModel, ClientError> {
        self.open_with(OpenParams::new(reference.clone())).await
    }

    /// As [`Client::open_with`].
    pub async fn open_with(&self, params: OpenParams) -> Result<OpenModel, ClientError> {
        self.run(move |client| client.open_with(&params)).await
    }
}

/// As `client_methods`.
macro_rules! asynchronous_methods {
    (@row [$($doc:meta)*] ($($params:tt)*) $answer:ident($($type:tt)*)) => {};
    (@row [$($doc:meta)*] fn $call:ident(NoParams) Document($response:ty)) => {
        $(#[$doc])*
        pub async fn $call(&self) -> Result<$response, ClientError> {
            self.run(Client::$call).await
        }
    };
    (@row [$($doc:meta)*] fn $call:ident(Reference) Document($response:ty)) => {
        $(#[$doc])*
        pub async fn $call(&self, reference: &Reference) -> Result<$response, ClientError> {
            let reference = reference.clone();
            self.run(move |client| client.$call(&reference)).await
        }
    };
    (@row [$($doc:meta)*] fn $call:ident($params:ty) Document($response:ty)) => {
        $(#[$doc])*
        pub async fn $call(&self, params: $params) -> Result<$response, ClientError> {
            self.run(move |client| client.$call(&params)).await
        }
    };
    (@row [$($doc:meta)*] fn $call:ident($params:ty) Events($progress:ty, $done:ty)) => {
        $(#[$doc])*
        /// `on_event` is called on the request's thread.
        pub async fn $call(
            &self,
            params: $params,
            on_event: impl FnMut(Event<$progress, $done>) + Send + 'static,
        ) -> Result<$done, ClientError> {
            self.run(move |client| client.$call(&params, on_event)).await
        }
    };
    ($(
        $(#[$doc:meta])*
        $name:ident: $method:ident $path:tt, $verb:literal, $right:ident, [$($flag:ident),*],
            $(fn $call:ident)? ($($params:tt)*) -> $answer:ident($($type:tt)*);
    )*) => {
        impl AsyncClient {
            $(asynchronous_methods! { @row [$($doc)*] $(fn $call)? ($($params)*) $answer($($type)*) })*
        }
    };
}

routes!(asynchronous_methods);

struct Pending<T>(Arc<Mutex<Slot<T>>>);

enum Slot<T> {
    Working(Option<Waker>),
    Done(T),
    /// The thread has panicked, or the result has been taken.
    Gone,
}

impl<T: Send + 'static> Pending<T> {
    fn start(work: impl FnOnce() -> T + Send + 'static) -> Self {
        let slot = Arc::new(Mutex::new(Slot::Working(None)));
        let finish = WakeOnDrop(Arc::clone(&slot));
        // If no thread can be started, dropping the closure drops `finish`, which wakes the waiting task.
        let _started = thread::Builder::new()
            .name("blobd-client".to_owned())
            .spawn(move || finish.with(Slot::Done(work())));
        Self(slot)
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T, ClientError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut slot = lock(&self.0);
        if let Slot::Working(waker) = &mut *slot {
            *waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(match std::mem::replace(&mut *slot, Slot::Gone) {
            Slot::Done(done) => Ok(done),
            _ => Err(ClientError::Io(std::io::Error::other("the thread of the request could not run"))),
        })
    }
}

/// Wakes the waiting task on drop, also after a panic.
struct WakeOnDrop<T>(Arc<Mutex<Slot<T>>>);

impl<T> WakeOnDrop<T> {
    fn with(&self, done: Slot<T>) {
        let before = std::mem::replace(&mut *lock(&self.0), done);
        if let Slot::Working(Some(waker)) = before {
            waker.wake();
        }
    }
}

impl<T> Drop for WakeOnDrop<T> {
    fn drop(&mut self) {
        if matches!(*lock(&self.0), Slot::Working(_)) {
            self.with(Slot::Gone);
        }
    }
}

fn lock<T>(slot: &Mutex<Slot<T>>) -> MutexGuard<'_, Slot<T>> {
    // A slot is always replaced as a whole, so a poisoned lock is safe to use.
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::mpsc;
    use std::task::Wake;

    use super::*;

    struct Unpark(thread::Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let (mut future, mut context) = (pin!(future), Context::from_waker(&waker));
        loop {
            if let Poll::Ready(done) = future.as_mut().poll(&mut context) {
                return done;
            }
            thread::park();
        }
    }

    #[test]
    fn future_waits_until_its_thread_is_done() {
        let (sender, receiver) = mpsc::channel();
        let pending = Pending::start(move || receiver.recv().unwrap());
        thread::spawn(move || {
            thread::sleep(std::time::Duration::from_millis(20));
            sender.send(7).unwrap();
        });
        assert_eq!(block_on(pending).unwrap(), 7);
    }

    #[test]
    fn panic_of_the_thread_is_an_error() {
        let pending = Pending::start(|| -> u32 { panic!("on purpose") });
        let error = block_on(pending).unwrap_err().to_string();
        assert!(error.contains("could not run"), "{error}");
    }

    #[test]
    fn missing_daemon_is_reported_as_by_the_blocking_client() {
        let client = Client::with_connector(Arc::new(|| Err(std::io::ErrorKind::NotFound.into())));
        let client = AsyncClient::new(client);
        let error = block_on(client.open(&"m".parse().unwrap())).unwrap_err();
        assert!(matches!(error, ClientError::NotRunning { .. }), "{error}");
        assert!(matches!(block_on(client.models()), Err(ClientError::NotRunning { .. })));
    }
}
