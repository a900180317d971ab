//! Several hosts in virtual time, for deterministic tests of RDMA programs.

use crate::executor::{Executor, WaitReason};
use crate::placement::Interleaving;
use crate::report::{Failure, FailureCause, Report, RunRecorder};
use crate::simulated::{FabricSink, FlowIds, SimulatedFabric};
use crate::{
    Device, EndpointExchange, Instant, Settings,
    fault::{ProgramFault, Rule, RuleCounters, RuleId},
    sim::LinkSettings,
    trace::{EventSink, SharedSink},
};
use softhca_fabric::{Direction, HostId, LinkId};
use softhca_trace::NameTable;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

/// Polls of tasks that may follow each other without time passing.
const MAX_POLLS_WITHOUT_PROGRESS: u64 = 1_000_000;

/// The result of a host's code: nothing, or a `Result` whose error can be displayed. An error ends the run.
pub trait HostResult {
    /// The message of the error, if there is one.
    fn into_error(self) -> Option<String>;
}

impl HostResult for () {
    fn into_error(self) -> Option<String> {
        None
    }
}

impl<E: Display> HostResult for Result<(), E> {
    fn into_error(self) -> Option<String> {
        self.err().map(|error| error.to_string())
    }
}

type HostFuture = Pin<Box<dyn Future<Output = Option<String>>>>;

/// Whether a run waits for a host's code to end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HostLifetime {
    Background,
    Foreground,
}

struct Host {
    name: String,
    id: HostId,
    device: Device,
    program: Option<Box<dyn FnOnce(Device) -> HostFuture>>,
    lifetime: HostLifetime,
}

struct PlannedFault {
    from: String,
    to: String,
    rule: Rule,
    link: Option<LinkId>,
}

/// Several hosts in virtual time: their async code, their devices, the links between them, and scripted faults.
///
/// One seed decides queue pair numbers, keys, probabilities and [`rng`](crate::rng()). Equal seed and code give equal
/// events at the same nanosecond, on every machine. Code takes no virtual time; time passes in awaits:
///
/// ```
/// use softhca::{AccessFlags, ConnectOptions, QpType, ReceiveRequest, SendRequest, sim::World};
///
/// let mut world = World::new(7);
/// world.host("server", |device| async move {
///     let context = device.open();
///     let domain = context.allocate_protection_domain()?;
///     let queue = context.create_completion_queue(16)?;
///     let region = domain.allocate_region(64, AccessFlags::LOCAL_WRITE)?;
///     let pair = domain.create_queue_pair(QpType::Rc, &queue).build()?;
///     pair.init(&ConnectOptions::default())?;
///     pair.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &[region.sge(0, 64)] })?;
///     pair.exchange_and_connect(&device.endpoint_exchange(), "greeting", &ConnectOptions::default()).await?;
///     assert_eq!(queue.next().await.byte_len, 5);
///     assert_eq!(region.read_at(0, 5), b"hello");
///     Ok::<(), softhca::Error>(())
/// });
/// world.host("client", |device| async move {
///     let context = device.open();
///     let queue = context.create_completion_queue(16)?;
///     let pair = context.allocate_protection_domain()?.create_queue_pair(QpType::Rc, &queue).build()?;
///     pair.exchange_and_connect(&device.endpoint_exchange(), "greeting", &ConnectOptions::default()).await?;
///     pair.post_send(&SendRequest::send(1, &[]).inline_data(b"hello"))?;
///     assert!(queue.next().await.status.is_success());
///     Ok::<(), softhca::Error>(())
/// });
/// let report = world.run().unwrap();
/// assert_eq!(report.ended_at.nanos(), 2_000); // there and back over a link of 1 µs
/// ```
///
/// # What keeps it deterministic
/// Await only futures of this crate, and take time and random numbers from [`now`](crate::now()),
/// [`sleep`](crate::sleep()) and [`rng`](crate::rng()). The system clock, threads, the order of a `HashMap`, addresses of
/// memory, sockets and files break determinism.
///
/// # Blocking
/// In the code of a host, calls that block panic and name what to await instead. A loop that polls needs an await: ten
/// thousand empty polls without one panic. Outside of host code, on the devices of [`World::device`], a blocking call
/// advances virtual time.
pub struct World {
    seed: u64,
    fabric: SimulatedFabric,
    recorder: SharedSink<RunRecorder>,
    hosts: Vec<Host>,
    settings: Settings,
    default_link: Option<LinkSettings>,
    link_settings: BTreeMap<[String; 2], LinkSettings>,
    links: BTreeMap<[HostId; 2], LinkId>,
    faults: Vec<PlannedFault>,
    checks: Vec<Box<dyn FnOnce() -> Option<String>>>,
    time_limit: Duration,
}

impl World {
    /// Creates a world without hosts. Each pair of hosts gets a link with a delay of 1 µs and without a limit of its rate;
    /// [`World::link`] and [`World::default_link`] change that.
    pub fn new(seed: u64) -> World {
        let (fabric, recorder) = (SimulatedFabric::new(seed), SharedSink::<RunRecorder>::default());
        fabric.set_sink(recorder.clone());
        World {
            seed,
            fabric,
            recorder,
            hosts: Vec::new(),
            settings: Settings::default(),
            default_link: Some(LinkSettings { delay_ns: 1_000, ..LinkSettings::default() }),
            link_settings: BTreeMap::new(),
            links: BTreeMap::new(),
            faults: Vec::new(),
            checks: Vec::new(),
            time_limit: Duration::from_secs(600),
        }
    }

    /// Sets the device settings, such as `recovery`, of hosts that are added from now on.
    pub fn settings(&mut self, settings: Settings) -> &mut World {
        self.settings = settings;
        self
    }

    /// Sets the link that pairs of hosts get without [`World::link`]; `None` for no link. It applies to hosts that are added
    /// from now on.
    pub fn default_link(&mut self, line: Option<LinkSettings>) -> &mut World {
        self.default_link = line;
        self
    }

    /// Sets the link between two hosts. They may be added later.
    pub fn link(&mut self, first: &str, second: &str, line: LinkSettings) -> &mut World {
        let mut names = [first.to_owned(), second.to_owned()];
        names.sort();
        self.link_settings.insert(names, line);
        self.apply_topology();
        self
    }

    /// Puts a fault rule on the link from one host to another, such as `fault::acks().nth(2).drop()`. The hosts may be
    /// added later. Returns the number of the rule, which replaces the one it has.
    ///
    /// Relative PSNs, messages and transmissions in the selector count for each queue pair from its first packet. Roles
    /// are numbers from zero, in the order in which queue pairs reach RTS.
    pub fn fault(&mut self, from: &str, to: &str, rule: Rule) -> RuleId {
        let id = RuleId(self.faults.len() as u32);
        let rule = Rule { id, ..rule };
        self.faults.push(PlannedFault { from: from.into(), to: to.into(), rule, link: None });
        self.apply_topology();
        id
    }

    /// Injects a fault into the program of a host, such as `fault::calls(Verb::RegMr).nth(3).fail(Errno::ENOMEM)`. The
    /// host must be known. Returns the number of the rule, which replaces the one it has.
    ///
    /// # Panics
    /// If the world has no such host.
    pub fn inject(&mut self, host: &str, fault: ProgramFault) -> u32 {
        let found = self.hosts.iter().find(|known| known.name == host);
        found.unwrap_or_else(|| panic!("no host {host:?}")).device.inject(self.seed, fault)
    }

    /// Checks something at the end of a run, such as a [`History`](crate::history::History). The run fails if it returns
    /// an error.
    pub fn check<R: HostResult>(&mut self, check: impl FnOnce() -> R + 'static) -> &mut World {
        self.checks.push(Box::new(|| check().into_error()));
        self
    }

    /// Takes the choices of an interleaving instead of those of the seed.
    pub(crate) fn follow(&mut self, interleaving: Interleaving) {
        self.fabric.choices().follow(interleaving);
    }

    /// How many alternatives each choice of the run had, and whether there were more choices than an exploration varies.
    pub(crate) fn made_choices(&self) -> (Vec<u8>, bool) {
        let choices = self.fabric.choices();
        (choices.alternatives.clone(), choices.overflowed)
    }

    /// Keeps every event for [`Report::log`].
    pub fn record_log(&mut self) -> &mut World {
        self.recorder.lock().log.get_or_insert_default();
        self
    }

    /// Sends every event to `sink`, which must not call verbs. A [`SharedSink`] lets the caller read it after the run.
    pub fn event_sink(&mut self, sink: impl EventSink + Send + 'static) -> &mut World {
        self.recorder.lock().forward_to = Some(Box::new(sink));
        self
    }

    /// Sets how much virtual time a run may take: ten minutes by default. A run that takes longer fails with
    /// [`FailureCause::TimeLimit`](crate::sim::FailureCause::TimeLimit).
    pub fn time_limit(&mut self, time_limit: Duration) -> &mut World {
        self.time_limit = time_limit;
        self
    }

    /// The place where hosts exchange endpoints by name before they are connected.
    pub fn endpoint_exchange(&self) -> EndpointExchange {
        self.fabric.endpoint_exchange()
    }

    /// The virtual time since the start.
    pub fn now(&self) -> Instant {
        self.fabric.lock().now()
    }

    /// Adds a host and its code. A run ends when the code of all such hosts has ended, and fails if it returns an error.
    ///
    /// # Panics
    /// If the name is taken.
    pub fn host<F, R>(&mut self, name: &str, code: F) -> &mut World
    where
        F: FnOnce(Device) -> R + 'static,
        R: Future<Output: HostResult> + 'static,
    {
        self.add_host(name, HostLifetime::Foreground, Some(box_program(code)));
        self
    }

    /// Adds a host whose code may run for ever, such as a server: a run does not wait for it to end.
    ///
    /// # Panics
    /// If the name is taken.
    pub fn service<F, R>(&mut self, name: &str, code: F) -> &mut World
    where
        F: FnOnce(Device) -> R + 'static,
        R: Future<Output: HostResult> + 'static,
    {
        self.add_host(name, HostLifetime::Background, Some(box_program(code)));
        self
    }

    /// Adds a host without code and returns its device, for tests that call verbs themselves.
    ///
    /// # Panics
    /// If the name is taken.
    pub fn device(&mut self, name: &str) -> Device {
        self.add_host(name, HostLifetime::Background, None)
    }

    fn add_host(
        &mut self,
        name: &str,
        ends: HostLifetime,
        main: Option<Box<dyn FnOnce(Device) -> HostFuture>>,
    ) -> Device {
        assert!(self.hosts.iter().all(|host| host.name != name), "there is a host {name:?} already");
        let id = self.fabric.lock().add_host(name, self.settings);
        self.recorder.lock().host_names.push(name.into());
        let device = self.fabric.device(id, FlowIds::Automatic);
        self.hosts.push(Host {
            name: name.into(),
            id,
            device: device.clone(),
            program: main,
            lifetime: ends,
        });
        self.apply_topology();
        device
    }

    fn host_id(&self, name: &str) -> Option<HostId> {
        self.hosts.iter().find(|host| host.name == name).map(|host| host.id)
    }

    /// Creates links and faults whose hosts are known.
    fn apply_topology(&mut self) {
        let fabric = &mut *self.fabric.lock();
        for (index, first) in self.hosts.iter().enumerate() {
            for second in &self.hosts[index + 1..] {
                let mut names = [first.name.clone(), second.name.clone()];
                names.sort();
                let own = self.link_settings.get(&names).copied();
                match (self.links.get(&[first.id, second.id]), own.or(self.default_link)) {
                    (None, Some(line)) => {
                        let link = fabric.add_link(first.id, second.id, line);
                        self.recorder.lock().link_ends.push([first.id, second.id]);
                        self.links.insert([first.id, second.id], link);
                    }
                    (Some(link), _) if own.is_some_and(|own| own != *fabric.link(*link).settings()) => {
                        fabric.link_mut(*link).set_settings(own.expect("it was seen above"));
                    }
                    _ => {}
                }
            }
        }
        for index in 0..self.faults.len() {
            let fault = &self.faults[index];
            let (Some(from), Some(to)) = (self.host_id(&fault.from), self.host_id(&fault.to)) else {
                continue;
            };
            let ends = [from.min(to), from.max(to)];
            let Some(link) = self.links.get(&ends).copied().filter(|_| fault.link.is_none()) else {
                continue;
            };
            let direction = if from < to { Direction::Forward } else { Direction::Backward };
            let mut rule = fault.rule.clone();
            rule.selector.direction = Some(direction);
            fabric.add_rule(link, rule);
            self.faults[index].link = Some(link);
        }
    }

    /// Runs a test once for each seed, or only for the one in `SOFTHCA_SEED`. `prepare` adds hosts and faults.
    ///
    /// ```
    /// use softhca::sim::World;
    ///
    /// World::for_each_seed(1..=20, |world| {
    ///     world.host("alone", |_| async { softhca::sleep(std::time::Duration::from_micros(1)).await });
    /// });
    /// ```
    ///
    /// # Panics
    /// If a run fails. The message has the failure with its explanation, and the command that repeats the seed. If
    /// `SOFTHCA_TEST_LOGS` names a folder, the event log of the run is there, for `softhca why` and `softhca report`.
    pub fn for_each_seed(seeds: impl IntoIterator<Item = u64>, prepare: impl Fn(&mut World)) {
        let chosen = std::env::var("SOFTHCA_SEED");
        let seeds: Vec<u64> = match &chosen {
            Ok(text) => vec![text.parse().unwrap_or_else(|_| panic!("SOFTHCA_SEED={text} is not a number"))],
            Err(_) => seeds.into_iter().collect(),
        };
        for seed in seeds {
            let mut world = World::new(seed);
            prepare(&mut world);
            let Err(failure) = world.run() else { continue };
            let thread = std::thread::current();
            let test = thread.name().filter(|name| *name != "main").unwrap_or_default();
            let log = match std::env::var_os("SOFTHCA_TEST_LOGS") {
                Some(folder) => {
                    let name = format!("{}-{seed}.jsonl", test.replace("::", "-"));
                    let path = std::path::Path::new(&folder).join(name);
                    match world.write_log(test, &path) {
                        Ok(()) => format!("\nThe event log: {}", path.display()),
                        Err(error) => format!("\nNo event log: {}: {error}", path.display()),
                    }
                }
                None => String::new(),
            };
            panic!("{failure}\n\nTo run this seed alone: SOFTHCA_SEED={seed} cargo test {test}{log}");
        }
    }

    fn write_log(&self, title: &str, path: &std::path::Path) -> std::io::Result<()> {
        let names = self.names(&self.fabric.lock());
        self.recorder.lock().recent.write_log(&names, title, path)
    }

    fn names(&self, fabric: &softhca_fabric::World<FabricSink>) -> NameTable {
        let mut names = NameTable::from_world(fabric);
        for fault in &self.faults {
            names.add_rule(fault.rule.id, &format!("{} to {}", fault.from, fault.to));
        }
        names
    }

    fn failure(&self, cause: FailureCause) -> Failure {
        let fabric = self.fabric.lock();
        let names = self.names(&fabric);
        let has_outstanding =
            fabric.hosts().any(|(_, host)| host.hca().queue_pairs().any(|view| view.outstanding > 0));
        let mut explanation = self.recorder.lock().recent.explain(&names, has_outstanding);
        let choices = self.fabric.choices();
        if !choices.described.is_empty() {
            let seen = choices.described.join("\n  ");
            explanation += &format!("\nwhat a device in order would not have shown:\n  {seen}");
        }
        Failure { seed: self.seed, at: fabric.now(), cause, explanation }
    }

    /// Every name that links and faults use has a host.
    fn check_names(&self) -> Result<(), Failure> {
        let faults = self.faults.iter().flat_map(|fault| [&fault.from, &fault.to]);
        for name in self.link_settings.keys().flatten().chain(faults) {
            if self.host_id(name).is_none() {
                let known = self.hosts.iter().map(|host| host.name.clone()).collect();
                return Err(self.failure(FailureCause::UnknownHost { name: name.clone(), known }));
            }
        }
        Ok(())
    }

    /// Runs the code of all hosts to its end.
    ///
    /// # Errors A [`Failure`] names the host whose code returned an error or panicked, or the hosts that wait and their
    /// reasons. It has the time and the seed that repeats the run.
    pub fn run(&mut self) -> Result<Report, Failure> {
        self.check_names()?;
        let executor = Executor::in_virtual_time(self.seed);
        let unfinished = Rc::new(std::cell::RefCell::new(BTreeMap::new()));
        let error = Rc::new(std::cell::RefCell::new(None));
        for host in &mut self.hosts {
            let Some(main) = host.program.take() else { continue };
            let (group, device) = (host.id.0 as usize, host.device.clone());
            if host.lifetime == HostLifetime::Foreground {
                unfinished.borrow_mut().insert(group, host.name.clone());
            }
            let (unfinished, error) = (unfinished.clone(), error.clone());
            executor.spawn_in(group, async move {
                let failure = main(device).await;
                unfinished.borrow_mut().remove(&group);
                if let Some(message) = failure {
                    error.borrow_mut().get_or_insert((group, message));
                }
            });
        }
        let names: Vec<String> = self.hosts.iter().map(|host| host.name.clone()).collect();
        let until = self.now().plus(self.time_limit);
        loop {
            executor.set_now(self.now());
            let mut polls = 0;
            loop {
                match executor.poll_one() {
                    Ok(false) => break,
                    Ok(true) => polls += 1,
                    Err(panicked) => {
                        let host = names[panicked.group].clone();
                        let message = panicked.message();
                        return Err(self.failure(FailureCause::Panic { host, message }));
                    }
                }
                if let Some((group, message)) = error.borrow_mut().take() {
                    let host: &String = &names[group];
                    return Err(self.failure(FailureCause::Error { host: host.clone(), message }));
                }
                if polls == MAX_POLLS_WITHOUT_PROGRESS {
                    let host = names[executor.group()].clone();
                    return Err(self.failure(FailureCause::Livelock { host }));
                }
            }
            if unfinished.borrow().is_empty() {
                for check in std::mem::take(&mut self.checks) {
                    if let Some(message) = check() {
                        return Err(self.failure(FailureCause::Check { message }));
                    }
                }
                return Ok(self.report());
            }
            let waiting = || -> Vec<(String, Vec<WaitReason>)> {
                let unfinished = unfinished.borrow();
                unfinished.iter().map(|(group, name)| (name.clone(), executor.wait_reasons(*group))).collect()
            };
            let mut fabric = self.fabric.lock();
            match (executor.next_timer(), fabric.next_event_at()) {
                (None, None) => {
                    let queue_pairs = self.recorder.lock().recent.describe_waits(&fabric);
                    drop(fabric);
                    return Err(self.failure(FailureCause::Deadlock { waiting: waiting(), queue_pairs }));
                }
                (timer, event) if timer.into_iter().chain(event).min() > Some(until) => {
                    fabric.run_until(until);
                    let queue_pairs = self.recorder.lock().recent.describe_waits(&fabric);
                    let limit = self.time_limit;
                    drop(fabric);
                    let waiting = waiting();
                    return Err(self.failure(FailureCause::TimeLimit { limit, waiting, queue_pairs }));
                }
                (Some(timer), event) if event.is_none_or(|event| timer < event) => {
                    fabric.run_until(timer);
                }
                _ => {
                    fabric.step();
                }
            }
            executor.set_now(fabric.now());
            drop(fabric);
            executor.fire_timers();
            executor.wake_yielded();
        }
    }

    fn report(&self) -> Report {
        let fabric = self.fabric.lock();
        let tallies = self.faults.iter().filter_map(|fault| {
            let mut rules = fabric.link(fault.link?).rules();
            rules
                .find(|(rule, _)| rule.id == fault.rule.id)
                .map(|(rule, counters): (_, RuleCounters)| (rule.id, counters))
        });
        let tallies = tallies.collect();
        let (ended_at, frame_counters) = (fabric.now(), fabric.frame_counters());
        let mut recorder = self.recorder.lock();
        let digest = recorder.digest.0;
        let record = recorder.log.as_mut().map(std::mem::take).unwrap_or_default();
        Report { seed: self.seed, ended_at, digest, frame_counters, log: record, rule_counters: tallies }
    }
}

fn box_program<F, R>(code: F) -> Box<dyn FnOnce(Device) -> HostFuture>
where
    F: FnOnce(Device) -> R + 'static,
    R: Future<Output: HostResult> + 'static,
{
    Box::new(move |device| {
        let future = code(device);
        Box::pin(async move { future.await.into_error() })
    })
}
