//! Serves the page of a live run on loopback, read-only.
//!
//! The URL contains a secret token. A request with another token, another `Host`, another origin or another method than
//! GET gets an error and no data. A WebSocket carries every line of the log in order; a browser that lost its connection
//! names the line at which it continues.

use crate::Page;
use axum::body::Bytes;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// The most bytes of a request.
const MAX_REQUEST_BYTES: usize = 16 << 10;
/// How long a browser may take to send a request, and to read a message.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a request and its response may take.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often an idle browser gets a ping.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// The most lines of one message.
const MAX_LINES_PER_MESSAGE: usize = 2000;
/// The most bytes of a message from a browser, which has nothing to say.
const MAX_BROWSER_MESSAGE_BYTES: usize = 1 << 10;
/// The most connections with the token at a time.
const MAX_CONNECTIONS: usize = 32;
/// The most connections at a time whose request has not arrived. Every user of the machine can connect and send nothing:
/// one connection more closes the oldest, so that they do not lock out the owner.
const MAX_PENDING: usize = 32;
/// The most bytes that the feed keeps for browsers that connect later. A longer log ends there.
const MAX_FEED_BYTES: usize = 1 << 30;
const RESPONSE_HEADERS: [(HeaderName, &str); 4] = [
    (header::CACHE_CONTROL, "no-store"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
];

/// The lines of a log so far.
#[derive(Clone, Default)]
pub struct EventFeed(Arc<Feed>);

#[derive(Default)]
struct Feed {
    log: Mutex<Log>,
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct Log {
    lines: Vec<Box<str>>,
    bytes: usize,
    ended: bool,
}

/// A message has at most this many lines of the log.
struct Batch {
    text: String,
    lines: usize,
    is_last: bool,
}

impl EventFeed {
    /// Adds a line without its line feed. Returns whether the feed accepts more.
    pub fn push(&self, line: &str) -> bool {
        let mut log = self.lock();
        log.bytes += line.len();
        log.lines.push(line.into());
        self.0.changed.send_replace(());
        log.bytes < MAX_FEED_BYTES
    }

    /// Ends the log.
    pub fn end(&self) {
        self.lock().ended = true;
        self.0.changed.send_replace(());
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.0.log.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn batch_from(&self, first: usize) -> Batch {
        let log = self.lock();
        let lines = log.lines.get(first..).unwrap_or_default();
        let lines = &lines[..lines.len().min(MAX_LINES_PER_MESSAGE)];
        let is_last = log.ended && first.saturating_add(lines.len()) >= log.lines.len();
        Batch { text: lines.join("\n"), lines: lines.len(), is_last }
    }

    /// Sends the lines from `next` until the log ends, or the browser disconnects or stops reading.
    /// The next batch is built when the browser has taken the previous one.
    async fn send(&self, mut socket: WebSocket, mut next: usize) -> Result<(), axum::Error> {
        let mut changed = self.0.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let Batch { text, lines, is_last } = self.batch_from(next);
            next += lines;
            if lines > 0 {
                send_message(&mut socket, Message::Text(text.into())).await?;
            }
            if is_last {
                let frame = CloseFrame { code: close_code::NORMAL, reason: "the log ended".into() };
                return send_message(&mut socket, Message::Close(Some(frame))).await;
            }
            if lines == 0 {
                tokio::select! {
                    _ = changed.changed() => {}
                    received = socket.recv() => match received {
                        None | Some(Err(_) | Ok(Message::Close(_))) => return Ok(()),
                        Some(Ok(_)) => {}
                    },
                    () = tokio::time::sleep(PING_INTERVAL) => send_message(&mut socket, Message::Ping(Bytes::new())).await?,
                }
            }
        }
    }
}

async fn send_message(socket: &mut WebSocket, message: Message) -> Result<(), axum::Error> {
    timeout(IDLE_TIMEOUT, socket.send(message)).await.map_err(axum::Error::new)?
}

/// A server for one feed.
pub struct LiveServer {
    listener: TcpListener,
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    hosts: [String; 2],
    token: String,
    page: Bytes,
    feed: EventFeed,
}

impl LiveServer {
    /// Binds this port of 127.0.0.1, or a free one if it is 0. `token` is the secret of the URL.
    pub fn bind(port: u16, token: &str, name: &str, feed: EventFeed) -> io::Result<LiveServer> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let mut page = Vec::new();
        Page::live(name).write(&mut page)?;
        let shared = Shared {
            hosts: [address.to_string(), format!("localhost:{}", address.port())],
            token: token.into(),
            page: page.into(),
            feed,
        };
        Ok(LiveServer { listener, address, shared: Arc::new(shared) })
    }

    /// The URL of the page.
    pub fn url(&self) -> String {
        format!("http://{}/{}/", self.address, self.shared.token)
    }

    /// Serves until the process ends.
    pub fn serve(&self) -> io::Result<()> {
        let router = Router::new()
            .route("/{token}/", get(page))
            .route("/{token}/events", get(events))
            .fallback(|| async { rejection(StatusCode::NOT_FOUND) })
            .layer(middleware::from_fn_with_state(self.shared.clone(), authorize))
            .with_state(self.shared.clone());
        let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let listener = self.listener.try_clone()?;
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let mut pending: VecDeque<(AbortHandle, Weak<Admission>)> = VecDeque::new();
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                pending.retain(|(_, admission)| {
                    admission.upgrade().is_some_and(|admission| admission.permit.get().is_none())
                });
                if pending.len() == MAX_PENDING
                    && let Some((oldest, _)) = pending.pop_front()
                {
                    oldest.abort();
                }
                let admission = Arc::new(Admission { permits: permits.clone(), permit: OnceLock::new() });
                let weak = Arc::downgrade(&admission);
                let task = tokio::spawn(serve_connection(stream, router.clone(), admission));
                pending.push_back((task.abort_handle(), weak));
            }
        })
    }
}

/// A connection. It takes a permit when its request has the token.
struct Admission {
    permits: Arc<Semaphore>,
    permit: OnceLock<OwnedSemaphorePermit>,
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

/// Answers the one request of a connection. A WebSocket keeps the admission.
async fn serve_connection(stream: TcpStream, router: Router, admission: Arc<Admission>) {
    let service = TowerToHyperService::new(router.layer(Extension(admission)));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_TIMEOUT)
        .max_buf_size(MAX_REQUEST_BYTES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    // A browser that disconnects or stops reading is not an error.
    let _ = timeout(EXCHANGE_TIMEOUT, connection).await;
}

/// Rejects a request without the token, from another site, or with another method than GET.
async fn authorize(
    State(shared): State<Arc<Shared>>,
    Extension(admission): Extension<Arc<Admission>>,
    request: Request,
    next: Next,
) -> Response {
    let token = request.uri().path().split('/').nth(1).unwrap_or_default();
    let response = if !constant_time_eq(token, &shared.token) || !is_same_site(&shared, request.headers()) {
        rejection(StatusCode::NOT_FOUND)
    } else if request.method() != Method::GET {
        rejection(StatusCode::METHOD_NOT_ALLOWED)
    } else if !admission.is_granted() {
        rejection(StatusCode::SERVICE_UNAVAILABLE)
    } else {
        next.run(request).await
    };
    (RESPONSE_HEADERS, response).into_response()
}

fn is_same_site(shared: &Shared, headers: &HeaderMap) -> bool {
    let value = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let is_own = |host: &str| shared.hosts.iter().any(|own| own == host);
    value(header::HOST).is_some_and(is_own)
        && value(header::ORIGIN).is_none_or(|origin| origin.strip_prefix("http://").is_some_and(is_own))
        && value(HeaderName::from_static("sec-fetch-site"))
            .is_none_or(|site| matches!(site, "same-origin" | "none"))
}

fn rejection(status: StatusCode) -> Response {
    (status, "Open the link that softhca explore printed.\n").into_response()
}

async fn page(State(shared): State<Arc<Shared>>) -> Html<Bytes> {
    Html(shared.page.clone())
}

#[derive(serde::Deserialize)]
struct Position {
    /// The first line that the browser does not have.
    #[serde(default)]
    from: usize,
}

async fn events(
    State(shared): State<Arc<Shared>>,
    Extension(admission): Extension<Arc<Admission>>,
    Query(Position { from }): Query<Position>,
    upgrade: WebSocketUpgrade,
) -> Response {
    upgrade.max_message_size(MAX_BROWSER_MESSAGE_BYTES).on_upgrade(move |socket| async move {
        // A browser that disconnects is not an error.
        let _ = shared.feed.send(socket, from).await;
        drop(admission);
    })
}

/// Compares in a time that does not depend on the position of the first difference.
fn constant_time_eq(one: &str, other: &str) -> bool {
    one.len() == other.len()
        && one.bytes().zip(other.bytes()).fold(0, |difference, (one, other)| difference | (one ^ other)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpStream};

    fn start(feed: &EventFeed) -> Arc<LiveServer> {
        let server = Arc::new(LiveServer::bind(0, "secret", "a run", feed.clone()).expect("a port"));
        let serving = server.clone();
        std::thread::spawn(move || serving.serve());
        server
    }

    fn connect(server: &LiveServer, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(server.address).expect("a connection");
        stream.write_all(request.as_bytes()).expect("a request");
        stream
    }

    fn response(mut stream: TcpStream) -> Vec<u8> {
        let mut response = Vec::new();
        // A server that rejects a request may reset the connection before it has read all of it.
        let _ = stream.read_to_end(&mut response);
        response
    }

    fn websocket(server: &LiveServer, target: &str) -> String {
        let address = server.address;
        format!(
            "GET {target} HTTP/1.1\r\nHost: {address}\r\nOrigin: http://{address}\r\nUpgrade: websocket\r\n\
             Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
    }

    fn status(response: &[u8]) -> String {
        String::from_utf8_lossy(response).lines().next().unwrap_or_default().into()
    }

    fn contains(response: &[u8], text: &[u8]) -> bool {
        response.windows(text.len()).any(|part| part == text)
    }

    /// Reads the head of a response.
    fn read_head(stream: &mut TcpStream) -> Vec<u8> {
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|count| count == 1) {
            head.push(byte[0]);
        }
        head
    }

    #[test]
    fn only_requests_with_the_token_from_the_same_site_get_data() {
        let feed = EventFeed::default();
        feed.push("first");
        feed.push("second");
        feed.end();
        let server = start(&feed);
        let host = format!("Host: {}\r\n", server.address);
        for (line, headers, expected) in [
            ("GET /secret/", host.clone(), "200"),
            ("GET /wrong/", host.clone(), "404"),
            ("GET /", host.clone(), "404"),
            ("GET /secret", host.clone(), "404"),
            ("GET /secret/other", host.clone(), "404"),
            ("POST /secret/", host.clone(), "405"),
            ("HEAD /secret/", host.clone(), "405"),
            ("GET /secret/", String::new(), "404"),
            ("GET /secret/", "Host: attacker.example\r\n".into(), "404"),
            ("GET /secret/", format!("{host}Sec-Fetch-Site: cross-site\r\n"), "404"),
            ("GET /secret/", format!("{host}Origin: null\r\n"), "404"),
            ("GET /secret/events", format!("{host}Origin: http://attacker.example\r\n"), "404"),
        ] {
            let response = response(connect(&server, &format!("{line} HTTP/1.1\r\n{headers}\r\n")));
            assert!(status(&response).contains(expected), "{line} {headers}: {}", status(&response));
            assert!(contains(&response, b"x-frame-options: DENY"), "{line} {headers}");
            assert_eq!(contains(&response, b"<html"), expected == "200", "{line} {headers}");
        }
        let foreign = websocket(&server, "/secret/events").replace("Origin: http://", "Origin: http://x.");
        for (request, expected) in [
            (websocket(&server, "/wrong/events"), "404"),
            (foreign, "404"),
            (websocket(&server, "/secret/events?from=x"), "400"),
            (websocket(&server, "/secret/events"), "101"),
        ] {
            let response = response(connect(&server, &request));
            assert!(status(&response).contains(expected), "{request}: {}", status(&response));
        }
        let all = response(connect(&server, &websocket(&server, "/secret/events")));
        assert!(contains(&all, b"\x81\x0cfirst\nsecond"), "{all:?}");
        let rest = response(connect(&server, &websocket(&server, "/secret/events?from=1")));
        assert!(contains(&rest, b"\x81\x06second") && !contains(&rest, b"first"), "{rest:?}");
        let beyond = format!("/secret/events?from={}", usize::MAX);
        let nothing = response(connect(&server, &websocket(&server, &beyond)));
        assert!(contains(&nothing, b"the log ended") && !contains(&nothing, b"second"), "{nothing:?}");
    }

    #[test]
    fn a_request_that_is_too_long_gets_no_data() {
        let server = start(&EventFeed::default());
        let filler = "x".repeat(2 * MAX_REQUEST_BYTES);
        let request = format!("GET /secret/ HTTP/1.1\r\nHost: {}\r\nX: {filler}\r\n\r\n", server.address);
        let response = response(connect(&server, &request));
        assert!(!contains(&response, b"<html"), "{}", status(&response));
    }

    #[test]
    fn connections_without_a_request_do_not_lock_out_the_owner() {
        let server = start(&EventFeed::default());
        // As another user can: some send nothing, some a part of a request.
        let slow: Vec<_> = (0..2 * MAX_PENDING)
            .map(|index| connect(&server, if index % 2 == 0 { "" } else { "GET /secret/ HT" }))
            .collect();
        let request = format!("GET /secret/ HTTP/1.1\r\nHost: {}\r\n\r\n", server.address);
        let response = response(connect(&server, &request));
        assert!(status(&response).contains("200"), "{}", status(&response));
        drop(slow);
    }

    #[test]
    fn connections_above_the_limit_are_rejected_and_a_closed_one_makes_room() {
        let feed = EventFeed::default();
        let server = start(&feed);
        let request = websocket(&server, "/secret/events");
        let mut open = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            let mut stream = connect(&server, &request);
            assert!(status(&read_head(&mut stream)).contains("101"));
            open.push(stream);
        }
        assert!(status(&response(connect(&server, &request))).contains("503"), "there is no room");
        open.pop().expect("a connection").shutdown(Shutdown::Both).expect("it is open");
        // The server notices the end of a connection in its own time.
        while !status(&read_head(&mut connect(&server, &request))).contains("101") {
            std::thread::yield_now();
        }
        drop(open);
    }

    #[test]
    fn a_browser_that_does_not_read_holds_up_neither_the_log_nor_others() {
        let feed = EventFeed::default();
        let server = start(&feed);
        let mut slow = connect(&server, &websocket(&server, "/secret/events"));
        assert!(status(&read_head(&mut slow)).contains("101"));
        let line = "x".repeat(1000);
        // More than all socket buffers hold.
        for _ in 0..20 * MAX_LINES_PER_MESSAGE {
            assert!(feed.push(&line));
        }
        feed.end();
        let all = response(connect(&server, &websocket(&server, "/secret/events")));
        assert!(
            all.len() > 20 * MAX_LINES_PER_MESSAGE * 1000
                && contains(&all[all.len() - 64..], b"the log ended")
        );
        drop(slow);
    }
}
