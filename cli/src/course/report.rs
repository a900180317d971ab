//! The grade of a submission as text, JSON, JUnit and CSV.

use super::grader::CheckReport;
use crate::run::junit::{self, TestCase};
use crate::scenario::verdict_word;
use serde::Serialize;
use softhca_scenarios::Verdict;

/// The grade of a submission.
#[derive(Debug, Serialize)]
pub struct Grade {
    /// The folder as given.
    pub submission: String,
    pub exercise: String,
    pub title: String,
    /// The language of the program, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub language: Option<&'static str>,
    pub result: Verdict,
    /// The number of checks that passed.
    pub passed: usize,
    /// The number of checks of the exercise.
    pub total: usize,
    pub checks: Vec<CheckReport>,
    /// Why the checks ended early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped: Option<String>,
}

impl Grade {
    /// A submission that cannot be graded.
    pub fn unusable(submission: String, result: Verdict, why: String) -> Grade {
        let (exercise, title) = (String::new(), String::new());
        let (checks, stopped) = (Vec::new(), Some(why));
        Grade { submission, exercise, title, language: None, result, passed: 0, total: 0, checks, stopped }
    }

    /// Shortens the hints to those up to a level.
    pub fn limit_hints(&mut self, level: usize) {
        for check in &mut self.checks {
            check.hints.truncate(level);
        }
    }

    /// The first failure in one line.
    fn message(&self) -> String {
        let failed = self.checks.iter().find(|check| check.result != Verdict::Pass);
        let of_check = failed.map(|check| {
            let detail = check.details.first().map_or("", |detail| detail.lines().next().unwrap_or_default());
            format!("{}: {detail}", check.name)
        });
        self.stopped.clone().or(of_check).unwrap_or_default()
    }

    /// The text for a student. `all_hints` are the numbers of hints that the checks have.
    pub fn text(&self, all_hints: &[usize]) -> String {
        let language = self.language.map(|language| format!(", {language}")).unwrap_or_default();
        let mut text = format!(
            "{}  {}  ({}{language}): {} of {} checks passed\n",
            verdict_word(self.result),
            self.title,
            self.submission,
            self.passed,
            self.total
        );
        for (check, hints) in self.checks.iter().zip(all_hints) {
            text += &format!(
                "      {:<6} {}\n",
                verdict_word(check.result).replace("FAIL", "FAILED"),
                check.name
            );
            let indented = |text: &str| text.trim_end().replace('\n', "\n               ");
            for detail in &check.details {
                text += &format!("             - {}\n", indented(detail));
            }
            if !check.output.is_empty() {
                text +=
                    &format!("             {}\n", check.output.trim_end().replace('\n', "\n             "));
            }
            for (number, hint) in check.hints.iter().enumerate() {
                text += &format!("             hint {} of {hints}: {}\n", number + 1, indented(hint));
            }
            if check.hints.len() < *hints {
                text += &format!("             --hint {} shows the next hint\n", check.hints.len() + 1);
            }
        }
        if let Some(why) = &self.stopped {
            text += &format!("      stopped: {why}\n");
        }
        text
    }

    /// The first line of CSV.
    pub const CSV_HEADER: &'static str = "submission,exercise,language,result,passed,checks,message";

    /// A line of CSV.
    pub fn csv(&self) -> String {
        let result = match self.result {
            Verdict::Pass => "pass",
            Verdict::Fail => "fail",
            Verdict::Error => "error",
        };
        let fields = [
            self.submission.clone(),
            self.exercise.clone(),
            self.language.unwrap_or_default().to_owned(),
            result.to_owned(),
            self.passed.to_string(),
            self.total.to_string(),
            self.message(),
        ];
        fields.map(|field| csv_field(&field)).join(",")
    }
}

/// A field of CSV. Spreadsheets take text that begins with some characters for a formula.
fn csv_field(text: &str) -> String {
    let is_formula = text.starts_with(['=', '+', '-', '@', '\t', '\r']);
    let text = format!("{}{}", if is_formula { "'" } else { "" }, text.replace(['\n', '\r'], " "));
    match text.contains([',', '"']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    }
}

/// The JUnit report of several grades: a suite for each.
pub fn junit(grades: &[Grade]) -> String {
    let suites: Vec<_> = grades.iter().map(|grade| (grade.submission.as_str(), test_cases(grade))).collect();
    junit::document("softhca course", &suites)
}

fn test_cases(grade: &Grade) -> Vec<TestCase<'_>> {
    let case = |name: &str, verdict, texts: &[String], outputs, advice: &[String]| TestCase {
        class: &grade.submission,
        name: name.to_owned(),
        milliseconds: 0,
        verdict,
        is_flaky: false,
        message: texts.first().and_then(|text| text.lines().next()).unwrap_or_default().to_owned(),
        text: [texts, advice].concat().join("\n"),
        outputs,
    };
    let checks = grade.checks.iter();
    let checks =
        checks.map(|check| case(&check.name, check.result, &check.details, &check.output, &check.hints));
    let stopped = grade.stopped.iter();
    let stopped =
        stopped.map(|why| case("the grading ends", grade.result, std::slice::from_ref(why), "", &[]));
    checks.chain(stopped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grade() -> Grade {
        let check = |name: &str, result, details: &[&str]| CheckReport {
            name: name.into(),
            result,
            details: details.iter().map(|detail| (*detail).to_owned()).collect(),
            output: String::new(),
            hints: if result == Verdict::Pass { Vec::new() } else { vec!["one".into(), "two".into()] },
        };
        Grade {
            submission: "=ada".into(),
            exercise: "01-connect".into(),
            title: "Connect".into(),
            language: Some("c"),
            result: Verdict::Fail,
            passed: 1,
            total: 2,
            checks: vec![
                check("it starts", Verdict::Pass, &[]),
                check("it \"ends\"", Verdict::Fail, &["a,\nb", "c"]),
            ],
            stopped: None,
        }
    }

    #[test]
    fn csv_is_quoted_and_is_no_formula() {
        assert_eq!(grade().csv(), "'=ada,01-connect,c,fail,1,2,\"it \"\"ends\"\": a,\"");
        let stopped = Grade::unusable("x\ny".into(), Verdict::Error, "why".into());
        assert_eq!(stopped.csv(), "x y,,,error,0,0,why");
    }

    #[test]
    fn text_and_junit_have_every_check_and_the_hints_up_to_a_level() {
        let mut grade = grade();
        grade.limit_hints(1);
        let text = grade.text(&[0, 2]);
        assert!(text.starts_with("FAIL  Connect  (=ada, c): 1 of 2 checks passed\n"), "{text}");
        assert!(text.contains("hint 1 of 2: one\n") && !text.contains("two"), "{text}");
        assert!(text.contains("--hint 2 shows the next hint"), "{text}");
        let report = junit(&[grade]);
        assert!(
            report.contains("<testsuites name=\"softhca course\" tests=\"2\" failures=\"1\" errors=\"0\""),
            "{report}"
        );
        assert!(report.contains("name=\"it &quot;ends&quot;\""), "{report}");
    }
}
