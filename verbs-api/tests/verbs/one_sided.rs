//! What one-sided programs may see: the programs of the example, correct and broken, in every order of placement.

#[path = "../../examples/one_sided/lock.rs"]
mod lock;
#[path = "../../examples/one_sided/log.rs"]
mod log;
#[path = "../../examples/one_sided/peer.rs"]
mod peer;
#[path = "../../examples/one_sided/seqlock.rs"]
mod seqlock;

use lock::Release;
use log::Append;
use seqlock::Read;
use softhca::sim::{Exploration, FailedInterleaving, World};
use softhca::{
    AccessFlags, ConnectOptions, EmbeddedOptions, Error, Placement, QpType, ReceiveRequest, SendRequest,
    Settings, VerbsError,
};

type Program = fn(&mut World);
type Explored = Result<Exploration, Box<FailedInterleaving>>;

const CORRECT: [(&str, Program); 3] = [
    ("lock", |world| lock::prepare(world, Release::Atomic)),
    ("read", |world| seqlock::prepare(world, Read::Checked)),
    ("log", |world| log::prepare(world, Append::WriteThenAtomic)),
];

/// Programs that the specification does not allow. Cards keep the order of WRITEs, which hides two of them.
const BROKEN: [(&str, Program, &[Placement]); 4] = [
    ("lock", |world| lock::prepare(world, Release::Write), &[Placement::Adversarial]),
    (
        "read",
        |world| seqlock::prepare(world, Read::Unchecked),
        &[Placement::OutOfOrder, Placement::Adversarial],
    ),
    ("log of two WRITEs", |world| log::prepare(world, Append::WriteThenWrite), &[Placement::Adversarial]),
    (
        "log of one WRITE",
        |world| log::prepare(world, Append::OneWrite),
        &[Placement::OutOfOrder, Placement::Adversarial],
    ),
];

fn with(placement: Placement, program: Program) -> impl Fn(&mut World) {
    move |world| {
        world.settings(Settings { placement, ..Settings::default() });
        program(world);
    }
}

fn explore(seed: u64, placement: Placement, program: Program) -> Explored {
    World::explore(seed, 3_000, with(placement, program))
}

#[test]
fn correct_programs_pass_all_interleavings() {
    for (name, program) in CORRECT {
        for placement in Placement::ALL {
            for seed in 1..=5 {
                let explored = explore(seed, placement, program)
                    .unwrap_or_else(|failed| panic!("{name}, {placement:?}, seed {seed}: {failed}"));
                assert!(explored.is_complete, "{name}, {placement:?}, seed {seed}: {explored:?}");
            }
        }
    }
}

#[test]
fn broken_programs_are_found_within_a_few_interleavings() {
    for (name, program, placements) in BROKEN {
        for placement in Placement::ALL {
            let explored = explore(1, placement, program);
            match (placements.contains(&placement), explored) {
                (true, Err(failed)) => {
                    assert!(failed.runs <= 20, "{name}, {placement:?}: {failed}");
                    assert!(failed.to_string().contains("not linearizable"), "{name}: {failed}");
                    assert_eq!(
                        explore(1, placement, program).err(),
                        Some(failed),
                        "the exploration is deterministic"
                    );
                }
                (false, Ok(explored)) => assert!(explored.is_complete, "{name}, {placement:?}: {explored:?}"),
                (is_broken, explored) => panic!("{name}, {placement:?}, broken: {is_broken}: {explored:?}"),
            }
        }
    }
}

#[test]
fn seeds_find_broken_programs_and_pass_correct_ones() {
    let failures = |program: Program, placement| {
        let failed = |seed: &u64| {
            let mut world = World::new(*seed);
            with(placement, program)(&mut world);
            world.run().is_err()
        };
        (1..=100).filter(failed).count()
    };
    for (name, program) in CORRECT {
        assert_eq!(failures(program, Placement::Adversarial), 0, "{name}");
    }
    for (name, program, placements) in BROKEN {
        for placement in placements {
            let failures = failures(program, *placement);
            assert!(failures >= 5, "{name}, {placement:?}: {failures} of 100 seeds");
        }
    }
}

#[test]
fn a_seed_gives_the_same_run_again() {
    for placement in [Placement::OutOfOrder, Placement::Adversarial] {
        let run = |seed| {
            let mut world = World::new(seed);
            with(placement, |world| seqlock::prepare(world, Read::Checked))(&mut world);
            world.record_log();
            world.run().expect("the program is correct")
        };
        assert_eq!(run(3), run(3));
    }
}

/// A lost lock word: the host adds to a word with a load and a store while peers add with atomics. Atomics of a card
/// exclude each other only.
#[test]
fn a_store_of_the_host_may_be_lost_between_atomics() {
    let prepare = |world: &mut World| {
        world.settings(Settings { placement: Placement::Adversarial, ..Settings::default() });
        world.host("server", |device| async move {
            let served = peer::serve(&device, 4096, &["client"]).await?;
            softhca::sleep(std::time::Duration::from_micros(1)).await;
            // After the atomic has been executed, in one step of virtual time.
            served.region.write_at(0, &100u64.to_ne_bytes());
            softhca::sleep(std::time::Duration::from_micros(50)).await;
            let last = served.region.load(0);
            if last == 100 { Ok(()) } else { Err(format!("the store is lost: {last}")) }
                .map_err(Box::<dyn std::error::Error>::from)
        });
        world.host("client", |device| async move {
            let client = peer::Client::connect(&device, "client").await?;
            assert_eq!(client.compare_and_swap(0, 0, 7).await?, 0);
            Ok::<(), Error>(())
        });
    };
    let failed = World::explore(1, 100, prepare).expect_err("the store may be lost");
    assert!(failed.failure.to_string().contains("the store is lost: 7"), "{failed}");
}

#[test]
fn an_embedded_device_refuses_another_placement() {
    let settings = Settings { placement: Placement::Adversarial, ..Settings::default() };
    let options = EmbeddedOptions { settings, ..EmbeddedOptions::default() };
    match softhca::Device::embedded_with(options).err() {
        Some(Error::Verbs(VerbsError::Invalid { what: "placement", .. })) => {}
        other => panic!("{other:?}"),
    }
}

/// The specification orders these: no choice is left to the card.
#[test]
fn completions_reads_and_atomics_make_earlier_data_visible() {
    const LENGTH: usize = 4000;
    const LAST: [&str; 4] = ["send", "write with immediate", "read", "atomic"];
    for last in LAST {
        let prepare = |world: &mut World| {
            world.settings(Settings { placement: Placement::Adversarial, ..Settings::default() });
            world.host("server", move |device| async move {
                let context = device.open();
                let domain = context.allocate_protection_domain()?;
                let queue = context.create_completion_queue(4)?;
                let access =
                    AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
                let region = domain.allocate_region(8192, AccessFlags::LOCAL_WRITE | access)?;
                device.endpoint_exchange().publish("memory", region.remote_address(0));
                let pair = domain.create_queue_pair(QpType::Rc, &queue).build()?;
                pair.init(&ConnectOptions::default())?;
                pair.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &[region.sge(5000, 8)] })?;
                let options = ConnectOptions::default();
                pair.exchange_and_connect(&device.endpoint_exchange(), "client", &options).await?;
                match last {
                    "send" | "write with immediate" => assert!(queue.next().await.status.is_success()),
                    "read" => device.endpoint_exchange().lookup("read").await,
                    _ => {
                        while region.load(6000) == 0 {
                            softhca::yield_now().await;
                        }
                    }
                }
                assert!(region.read_at(0, LENGTH as u64).iter().all(|byte| *byte == 7), "{last}: stale");
                Ok::<(), Error>(())
            });
            world.host("client", move |device| async move {
                let client = peer::Client::connect(&device, "client").await?;
                client.buffer.write_at(0, &[7; LENGTH]);
                let data = [client.buffer.sge(0, LENGTH as u32)];
                let word = [client.buffer.sge(4000, 8)];
                let write = SendRequest::rdma_write(1, &data, client.at(0));
                let requests = match last {
                    "send" => vec![write, SendRequest::send(2, &word)],
                    "write with immediate" => {
                        vec![write, SendRequest::rdma_write_with_imm(2, &word, client.at(7000), 1)]
                    }
                    "read" => vec![write, SendRequest::rdma_read(2, &word, client.at(0))],
                    _ => vec![write, SendRequest::fetch_and_add(2, &word, client.at(6000), 1)],
                };
                client.run(requests).await?;
                if last == "read" {
                    assert_eq!(client.buffer.load(4000), u64::from_ne_bytes([7; 8]));
                    device.endpoint_exchange().publish("read", ());
                }
                Ok::<(), Error>(())
            });
        };
        let explored = World::explore(1, 500, prepare).unwrap();
        assert!(explored.is_complete, "{last}: {explored:?}");
    }
}
