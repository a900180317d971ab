//! Event logs: reading, text output, `softhca lint` and `softhca why`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_trace::EventLogReader;
use softhca_trace::lint::Linter;
use softhca_trace::log::EntryFormatter;
use softhca_trace::why::{LogAnalyzer, Query};

fuzz_target!(|bytes: &[u8]| {
    let Ok(log) = EventLogReader::new(bytes) else { return };
    let mut formatter = EntryFormatter::new(log.header());
    let mut linter = Linter::new(log.header());
    let mut analyzer = LogAnalyzer::new(log.header());
    for entry in log.map_while(Result::ok) {
        formatter.format(&entry);
        linter.push(&entry);
        analyzer.push(entry);
    }
    linter.findings().for_each(|finding| drop(finding.to_string()));
    if let Ok(diagnosis) = analyzer.diagnose(&Query::default()) {
        diagnosis.text(80);
    }
});
