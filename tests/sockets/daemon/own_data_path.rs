//! The daemon's own data path.
//!
//! By default, processes execute the transport themselves, and so do those of most tests here. These run again with a
//! daemon that executes it: its access to the memory of clients, rings that a client can corrupt, its wake-ups, the
//! connection manager's and multicast messages that it delivers, and the end of clients.

use super::process;

macro_rules! tests {
    ($($module:ident::$test:ident,)*) => {$(
        #[test]
        fn $test() {
            process::on_own_data_path(super::$module::$test);
        }
    )*};
}

tests! {
    data::two_processes_on_two_hosts_do_every_operation,
    data::application_memory_is_read_and_written,
    data::completion_events_wake_a_sleeping_process,
    connections::processes_on_one_host_connect_with_internal_loopback,
    multicast::groups_reach_the_clients_of_a_daemon_and_other_processes,
    hostile_clients::invalid_ring_indices_stop_that_queue_pair_only,
    hostile_clients::random_doorbells_and_changing_requests_are_survived,
    hostile_clients::handles_and_keys_of_other_clients_are_invalid,
    hostile_clients::a_client_whose_memory_blocks_is_killed_and_others_keep_working,
    last_byte::the_last_byte_is_written_last_in_client_memory,
    process_death::a_killed_client_leaks_nothing_and_its_peer_times_out,
    process_death::a_sigstopped_client_does_not_block_others_and_can_resume,
}
