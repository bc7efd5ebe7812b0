//! Answers of services in XML as small trees. Size, depth and number of elements are bounded, and no entity is defined.

use quick_xml::Reader;
use quick_xml::events::Event;

const MAX_DEPTH: usize = 16;
const MAX_ELEMENTS: usize = 100_000;

/// An element without its attributes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Element {
    pub(crate) name: String,
    pub(crate) text: String,
    pub(crate) inside: Vec<Element>,
}

impl Element {
    /// The elements in it with a name.
    pub(crate) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Self> {
        self.inside.iter().filter(move |one| one.name == name)
    }

    /// The first element in it with a name.
    pub(crate) fn first(&self, name: &str) -> Option<&Self> {
        self.inside.iter().find(|one| one.name == name)
    }

    /// The text of the first element in it with a name; empty without one.
    pub(crate) fn text_of(&self, name: &str) -> &str {
        self.first(name).map_or("", |one| one.text.trim())
    }
}

/// The outermost element; `None` if the text is no such document, or exceeds a bound.
pub(crate) fn parse(text: &[u8]) -> Option<Element> {
    let mut reader = Reader::from_reader(text);
    let mut open = vec![Element::default()];
    let mut n_elements = 0;
    loop {
        match reader.read_event().ok()? {
            Event::Start(tag) => {
                n_elements += 1;
                if open.len() > MAX_DEPTH || n_elements > MAX_ELEMENTS {
                    return None;
                }
                open.push(named(tag.local_name().as_ref())?);
            }
            Event::Empty(tag) => {
                n_elements += 1;
                if n_elements > MAX_ELEMENTS {
                    return None;
                }
                let made = named(tag.local_name().as_ref())?;
                open.last_mut()?.inside.push(made);
            }
            Event::End(_) => {
                let done = open.pop()?;
                open.last_mut()?.inside.push(done);
            }
            Event::Text(part) => open.last_mut()?.text.push_str(&part.decode().ok()?),
            Event::CData(part) => open.last_mut()?.text.push_str(&part.decode().ok()?),
            Event::GeneralRef(part) => {
                let known = match part.resolve_char_ref().ok()? {
                    Some(character) => character,
                    None => match &*part.decode().ok()? {
                        "amp" => '&',
                        "lt" => '<',
                        "gt" => '>',
                        "quot" => '"',
                        "apos" => '\'',
                        _ => return None,
                    },
                };
                open.last_mut()?.text.push(known);
            }
            Event::DocType(_) => return None,
            Event::Eof => {
                let document = open.pop().filter(|_| open.is_empty())?;
                let [root] = <[Element; 1]>::try_from(document.inside).ok()?;
                return Some(root);
            }
            Event::Decl(_) | Event::PI(_) | Event::Comment(_) => {}
        }
    }
}

fn named(name: &[u8]) -> Option<Element> {
    let name = std::str::from_utf8(name).ok()?.to_owned();
    Some(Element {
        name,
        ..Element::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_have_names_texts_and_elements() {
        let text =
            "<?xml version='1.0'?><a xmlns='u'><n:b>x&amp;&#65;<![CDATA[<]]></n:b><c/><b>2</b></a>";
        let root = parse(text.as_bytes()).unwrap();
        assert_eq!((&*root.name, root.text_of("b")), ("a", "x&A<"));
        assert_eq!(root.all("b").count(), 2);
        assert_eq!((root.text_of("c"), root.text_of("none")), ("", ""));
    }

    #[test]
    fn what_is_no_bounded_document_is_none() {
        let deep = "<a>".repeat(1 << 20);
        let closed = format!("{}{}", "<a>".repeat(100), "</a>".repeat(100));
        let wide = format!("<a>{}</a>", "<b/>".repeat(MAX_ELEMENTS + 1));
        let bomb = "<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>";
        for text in [
            "",
            "text",
            "<a>",
            "<a></b>",
            "</a>",
            "<a/><b/>",
            "<a>&b;</a>",
            "<a>\u{0}&#0;</a>",
            bomb,
            &deep,
            &closed,
            &wide,
        ] {
            assert_eq!(
                parse(text.as_bytes()),
                None,
                "{}",
                &text[..text.len().min(40)]
            );
        }
        assert_eq!(parse(b"<a>\xff</a>"), None);
    }
}
