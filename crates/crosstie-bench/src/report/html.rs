//! The HTML elements of a report. The output is also well-formed XML, so that tests can parse it.

use crosstie_kv::Backend;

/// Escapes text for an element or a quoted attribute. Control characters, characters that are invalid in XML, and those that change the
/// direction of text are replaced by U+FFFD.
pub(crate) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            '\n' | '\t' => safe.push(' '),
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{fffe}' | '\u{ffff}' => {
                safe.push('\u{fffd}')
            }
            c if c.is_control() => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

/// A cell of a table.
pub(crate) enum Cell {
    /// Text, left-aligned.
    Text(String),
    /// A figure, right-aligned.
    Figure(String),
    /// A list of figures.
    Figures(String),
    /// A backend's name with its colour.
    Backend(Backend),
}

impl Cell {
    fn html(&self, is_head: bool) -> String {
        let element = if is_head { "th scope=\"row\"" } else { "td" };
        let end = if is_head { "th" } else { "td" };
        match self {
            Cell::Text(text) => format!("<{element}>{}</{end}>", escape(text)),
            Cell::Figure(text) => format!("<{element} class=\"n\">{}</{end}>", escape(text)),
            Cell::Figures(text) => format!("<{element} class=\"runs\">{}</{end}>", escape(text)),
            Cell::Backend(backend) => format!("<{element}>{}</{end}>", chip(*backend)),
        }
    }
}

/// A backend's name with its colour.
pub(crate) fn chip(backend: Backend) -> String {
    format!("<span class=\"chip {}\">{}</span>", class(backend), backend.name())
}

/// The class that gives a mark its backend's colour.
pub(crate) fn class(backend: Backend) -> &'static str {
    match backend {
        Backend::Meta => "meta",
        Backend::Delegation => "delegation",
    }
}

/// A table; on a narrow page it scrolls horizontally. The first cell of a row is its head.
pub(crate) fn table(caption: &str, heads: &[&str], rows: &[Vec<Cell>]) -> String {
    let is_right_aligned = |at: usize| {
        rows.first().and_then(|row| row.get(at)).is_some_and(|cell| matches!(cell, Cell::Figure(_)))
    };
    let heads: String = heads
        .iter()
        .enumerate()
        .map(|(at, head)| {
            let class = if is_right_aligned(at) { " class=\"n\"" } else { "" };
            format!("<th scope=\"col\"{class}>{}</th>", escape(head))
        })
        .collect();
    let rows: String = rows
        .iter()
        .map(|row| {
            let cells: String = row.iter().enumerate().map(|(at, cell)| cell.html(at == 0)).collect();
            format!("<tr>{cells}</tr>\n")
        })
        .collect();
    format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\"><table>\n\
         <caption>{caption}</caption>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n",
        caption = escape(caption)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_text_contains_no_markup() {
        assert_eq!(escape("<b a='\"'>&amp;"), "&lt;b a=&#39;&quot;&#39;&gt;&amp;amp;");
        assert_eq!(escape("a\0b\u{1b}[31m\u{202e}c\nd"), "a\u{fffd}b\u{fffd}[31m\u{fffd}c d");
    }
}
