//! HTTP/1.1 for what a browser or a scraper reads: GET only, bounded in connections, bytes and time.
//!
//! A connection carries one request. Its response is a text, or a stream whose next part is built when the client has
//! taken the previous one.

pub use hyper::body::Incoming;
pub use hyper::{Request, StatusCode};

use hyper::body::{Body, Bytes, Frame};
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_io_timeout::TimeoutStream;

/// The most bytes of a request.
const MAX_REQUEST_BYTES: usize = 16 << 10;
/// How long a client may take to send a request, and to read what a socket holds.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a request and its response may take, if the response is not a stream.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(30);
/// The most connections at a time whose request is authorized.
const MAX_CONNECTIONS: usize = 32;
/// The most connections at a time whose request has not arrived. Every user of the machine can connect and send nothing:
/// one connection more closes the oldest, so that they do not lock out the owner.
const MAX_PENDING: usize = 32;
const RESPONSE_HEADERS: [(HeaderName, &str); 5] = [
    (header::CACHE_CONTROL, "no-store"),
    (header::CONNECTION, "close"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
];

/// The content of a server, and the requests that may read it.
pub trait Site: Send + Sync + 'static {
    /// The answer to every request that is not authorized.
    const NOT_FOUND: &'static str;

    /// Whether the sender of this request may know that this site exists.
    fn is_authorized(&self, request: &Request<Incoming>, client: SocketAddr) -> bool;

    /// The answer to an authorized GET, in the runtime of the server.
    fn respond(&self, request: &Request<Incoming>) -> Answer;
}

/// The answer to a request.
pub struct Answer {
    pub status: StatusCode,
    pub content_type: &'static str,
    pub content: Content,
}

impl Answer {
    /// A sentence, as plain text.
    pub fn text(status: StatusCode, sentence: impl Into<Bytes>) -> Answer {
        Answer { status, content_type: "text/plain; charset=utf-8", content: Content::Whole(sentence.into()) }
    }
}

/// The body of a response.
pub enum Content {
    Whole(Bytes),
    /// Ends when the sender is dropped.
    Stream(mpsc::Receiver<Bytes>),
}

impl Body for Content {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let part = match self.get_mut() {
            Content::Whole(bytes) => Some(std::mem::take(bytes)).filter(|bytes| !bytes.is_empty()),
            Content::Stream(parts) => std::task::ready!(parts.poll_recv(context)),
        };
        Poll::Ready(part.map(|bytes| Ok(Frame::data(bytes))))
    }
}

/// Serves a site on this listener until the process ends.
pub fn serve(listener: &TcpListener, site: Arc<impl Site>) -> io::Result<()> {
    let listener = listener.try_clone()?;
    listener.set_nonblocking(true)?;
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let mut pending: VecDeque<(AbortHandle, Weak<Admission>)> = VecDeque::new();
        loop {
            let Ok((stream, client)) = listener.accept().await else {
                // Without free descriptors, the next call fails at once.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            pending.retain(|(_, admission)| {
                admission.upgrade().is_some_and(|admission| admission.permit.get().is_none())
            });
            if pending.len() == MAX_PENDING
                && let Some((oldest, _)) = pending.pop_front()
            {
                oldest.abort();
            }
            let admission = Arc::new(Admission {
                permits: permits.clone(),
                permit: OnceLock::new(),
                streams: OnceLock::new(),
            });
            let weak = Arc::downgrade(&admission);
            let task = tokio::spawn(serve_connection(stream, client, site.clone(), admission));
            pending.push_back((task.abort_handle(), weak));
        }
    })
}

/// A connection. It takes a permit when its request is authorized.
struct Admission {
    permits: Arc<Semaphore>,
    permit: OnceLock<OwnedSemaphorePermit>,
    streams: OnceLock<()>,
}

impl Admission {
    /// Whether the number of connections permits this one.
    fn is_granted(&self) -> bool {
        match self.permits.clone().try_acquire_owned() {
            Ok(permit) => self.permit.set(permit).is_ok(),
            Err(_) => false,
        }
    }
}

/// Answers the one request of a connection.
async fn serve_connection(
    stream: TcpStream,
    client: SocketAddr,
    site: Arc<impl Site>,
    admission: Arc<Admission>,
) {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(IDLE_TIMEOUT));
    let service = service_fn(|request| {
        let response = answer(&*site, &request, client, &admission);
        async { Ok::<_, Infallible>(response) }
    });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE_TIMEOUT)
            .max_buf_size(MAX_REQUEST_BYTES)
            .keep_alive(false)
            .serve_connection(TokioIo::new(Box::pin(stream)), service)
    );
    // A client that disconnects or stops reading is not an error.
    if timeout(EXCHANGE_TIMEOUT, &mut connection).await.is_err() && admission.streams.get().is_some() {
        let _ = connection.await;
    }
}

fn answer<S: Site>(
    site: &S,
    request: &Request<Incoming>,
    client: SocketAddr,
    admission: &Admission,
) -> Response<Content> {
    let answer = if !site.is_authorized(request, client) {
        Answer::text(StatusCode::NOT_FOUND, S::NOT_FOUND)
    } else if request.method() != Method::GET {
        Answer::text(StatusCode::METHOD_NOT_ALLOWED, "Only GET is supported.\n")
    } else if !admission.is_granted() {
        Answer::text(StatusCode::SERVICE_UNAVAILABLE, "Too many connections are open.\n")
    } else {
        site.respond(request)
    };
    if matches!(answer.content, Content::Stream(_)) {
        let _ = admission.streams.set(());
    }
    let mut response = Response::new(answer.content);
    *response.status_mut() = answer.status;
    let headers = response.headers_mut();
    headers.extend(RESPONSE_HEADERS.map(|(name, value)| (name, HeaderValue::from_static(value))));
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(answer.content_type));
    response
}
