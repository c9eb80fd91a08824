//! Plots as SVG: one or more panels over one common axis.
//!
//! ```text
//!   ┌ title ───────────────────────────┐
//!   │ legends                          │     a figure without text in it is nothing to somebody who does not see it,
//!   │  y │      ╱───                   │     so every one has a title, a description and, beside it, its numbers
//!   │    │─────╱          panel 1      │
//!   │  y │ · ·: ·:.       panel 2      │     colours are those of Okabe and Ito, which colour-blind people tell apart;
//!   │    └──────────────── x           │     lines differ in their dashes too, for whoever prints in black
//!   └──────────────────────────────────┘
//! ```

pub(super) mod axis;

use axis::{Axis, Scale};

use super::html::Html;

/// How many colours there are, and so how many lines a plot has at most.
pub(super) const MAX_LINES: usize = 7;

/// Across the page.
pub(super) const WIDE: f64 = 900.0;
/// Two beside each other.
pub(super) const NARROW: f64 = 480.0;
const LEFT: f64 = 92.0;
const RIGHT: f64 = 16.0;
const BOTTOM: f64 = 44.0;
const LEGEND_ROW: f64 = 22.0;
const GAP: f64 = 14.0;
/// A character of the legend, roughly: it is set in 13 pixels.
const CHARACTER: f64 = 7.2;

/// How far points at one place stand from each other.
const ASIDE: f64 = 8.0;

/// How a line is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// Points with straight lines between them, and where they vary a bar.
    Points,
    /// A line that keeps its value until the next.
    Steps,
    /// Points alone.
    Dots,
}

/// Some values of one name.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) name: String,
    pub(super) points: Vec<Point>,
    pub(super) style: Style,
    /// Which colour: the same name has the same one in all panels.
    pub(super) colour: usize,
}

/// A value, and between what it varied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) range: Option<(f64, f64)>,
}

impl Point {
    pub(super) const fn at(x: f64, y: f64) -> Self {
        Self { x, y, range: None }
    }
}

/// One field of lines.
#[derive(Clone, Debug)]
pub(super) struct Panel {
    pub(super) y: Axis,
    pub(super) lines: Vec<Line>,
    pub(super) height: f64,
    /// What counts as no difference, drawn as a band.
    pub(super) band: Option<(f64, f64)>,
}

impl Panel {
    pub(super) const fn new(y: Axis, lines: Vec<Line>) -> Self {
        Self { y, lines, height: 230.0, band: None }
    }
}

/// A whole picture.
#[derive(Clone, Debug)]
pub(super) struct Plot {
    pub(super) title: String,
    pub(super) description: String,
    pub(super) x: Axis,
    pub(super) panels: Vec<Panel>,
    pub(super) width: f64,
}

impl Plot {
    /// The picture, or nothing where there is no value to show. `id` is unlike any other of the page.
    pub(super) fn html(&self, id: &str) -> Html {
        let xs = self.panels.iter().flat_map(|panel| &panel.lines).flat_map(|line| &line.points).map(|point| point.x);
        let Some(x) = Scale::fit(&self.x, xs, LEFT, self.width - LEFT - RIGHT) else {
            return Html::new();
        };
        let mut svg = Svg { shapes: Html::new(), right: self.width - RIGHT };
        let mut top = 0.0;
        let last = self.panels.len().saturating_sub(1);
        for (place, panel) in self.panels.iter().enumerate() {
            top = svg.legend(&panel.lines, top);
            svg.panel(panel, &x, &self.x, top, place == last);
            top += panel.height + GAP;
        }
        let height = top - GAP + BOTTOM;
        svg.label(&self.x.label, f64::midpoint(LEFT, self.width - RIGHT), height - 6.0, "middle");
        let (title_id, description_id) = (format!("{id}-title"), format!("{id}-description"));
        let mut out = Html::new();
        let class = if self.width > NARROW { "wide" } else { "narrow" };
        out.open("figure", &[("class", class)]).element("figcaption", &[], &Html::text(&self.title));
        out.open(
            "svg",
            &[
                ("viewBox", &format!("0 0 {} {height:.0}", self.width)),
                ("role", "img"),
                ("aria-labelledby", &format!("{title_id} {description_id}")),
            ],
        );
        out.element("title", &[("id", &title_id)], &Html::text(&self.title));
        out.element("desc", &[("id", &description_id)], &Html::text(&self.description));
        out.push(&svg.shapes).close("svg").close("figure");
        out
    }
}

/// Shapes, one after the other.
struct Svg {
    shapes: Html,
    right: f64,
}

impl Svg {
    /// Names with their lines, in as many rows as it takes, from `top` on. Answers where the panel may begin.
    fn legend(&mut self, lines: &[Line], top: f64) -> f64 {
        let (mut x, mut y) = (LEFT, top + 16.0);
        for line in lines {
            let wide = 34.0 + count(line.name.chars().count()) * CHARACTER + 18.0;
            if x > LEFT && x + wide > self.right {
                (x, y) = (LEFT, y + LEGEND_ROW);
            }
            let class = format!("l c{}", line.colour % MAX_LINES);
            if line.style == Style::Dots {
                self.circle(x + 13.0, y - 4.0, 4.0, line.colour, None);
            } else {
                self.path(&class, &format!("M{x:.1} {:.1}h26", y - 4.0));
            }
            self.label(&line.name, x + 34.0, y, "start");
            x += wide;
        }
        y + 14.0
    }

    fn panel(&mut self, panel: &Panel, x: &Scale, x_axis: &Axis, top: f64, is_last: bool) {
        let (bottom, right) = (top + panel.height, self.right);
        let ys = panel.lines.iter().flat_map(|line| &line.points).flat_map(|point| {
            let (low, high) = point.range.unwrap_or((point.y, point.y));
            [point.y, low, high]
        });
        let ys = ys.chain(panel.band.into_iter().flat_map(|(low, high)| [low, high]));
        let Some(y) = Scale::fit(&panel.y, ys, bottom, -panel.height) else {
            return;
        };
        if let Some((low, high)) = panel.band {
            let (from, to) = (y.place(high), y.place(low));
            self.path("band", &format!("M{LEFT} {from:.1}H{right}V{to:.1}H{LEFT}Z"));
        }
        for (place, name) in y.ticks(&panel.y) {
            self.path("grid", &format!("M{LEFT} {place:.1}H{right}"));
            self.label(&name, LEFT - 8.0, place + 4.0, "end");
        }
        for (place, name) in x.ticks(x_axis) {
            self.path("grid", &format!("M{place:.1} {top:.1}V{bottom:.1}"));
            if is_last {
                // The last one would leave the picture.
                let is_at_the_edge = place > right - 24.0;
                let (place, anchor) = if is_at_the_edge { (place.max(right), "end") } else { (place, "middle") };
                self.label(&name, place, bottom + 18.0, anchor);
            }
        }
        self.path("frame", &format!("M{LEFT} {top:.1}V{bottom:.1}H{right}"));
        self.rotated(&panel.y.label, 14.0, f64::midpoint(top, bottom));
        // Points of several lines at one place stand beside each other, so that no bar hides another.
        let with_bars = panel.lines.iter().filter(|line| line.style == Style::Points).count();
        for (index, line) in panel.lines.iter().enumerate() {
            let aside = if with_bars > 1 { ASIDE * (count(index) - count(with_bars - 1) / 2.0) } else { 0.0 };
            self.line(line, x, &y, (panel, x_axis), aside);
        }
    }

    fn line(&mut self, line: &Line, x: &Scale, y: &Scale, (panel, x_axis): (&Panel, &Axis), aside: f64) {
        let class = format!("l c{}", line.colour % MAX_LINES);
        let places: Vec<(f64, f64)> =
            line.points.iter().map(|point| (x.place(point.x) + aside, y.place(point.y))).collect();
        let mut path = String::new();
        for (index, (x, y)) in places.iter().enumerate() {
            path += &match (index, line.style) {
                (0, _) => format!("M{x:.1} {y:.1}"),
                (_, Style::Steps) => format!("H{x:.1}V{y:.1}"),
                _ => format!("L{x:.1} {y:.1}"),
            };
        }
        if line.style != Style::Dots {
            self.path(&class, &path);
        }
        if line.style == Style::Points {
            for (point, (x, _)) in line.points.iter().zip(&places) {
                if let Some((low, high)) = point.range.filter(|(low, high)| low < high) {
                    let (from, to) = (y.place(low), y.place(high));
                    self.path(&format!("bar c{}", line.colour % MAX_LINES), &format!("M{x:.1} {from:.1}V{to:.1}"));
                }
            }
        }
        if matches!(line.style, Style::Points | Style::Dots) {
            let radius = if line.style == Style::Points { 4.5 } else { 2.5 };
            for (point, (px, py)) in line.points.iter().zip(&places) {
                // A browser shows this when the pointer rests on it.
                let says =
                    format!("{}: {} at {}", line.name, panel.y.unit.format(point.y), x_axis.unit.format(point.x));
                self.circle(*px, *py, radius, line.colour, Some(&says));
            }
        }
    }

    fn path(&mut self, class: &str, path: &str) {
        self.shapes.open("path", &[("class", class), ("d", path)]).close("path");
    }

    fn circle(&mut self, x: f64, y: f64, radius: f64, colour: usize, says: Option<&str>) {
        let (cx, cy, r) = (format!("{x:.1}"), format!("{y:.1}"), format!("{radius}"));
        let class = format!("dot c{}", colour % MAX_LINES);
        self.shapes.open("circle", &[("class", &class), ("cx", &cx), ("cy", &cy), ("r", &r)]);
        says.into_iter().for_each(|says| {
            self.shapes.element("title", &[], &Html::text(says));
        });
        self.shapes.close("circle");
    }

    fn label(&mut self, text: &str, x: f64, y: f64, anchor: &str) {
        let (x, y) = (format!("{x:.1}"), format!("{y:.1}"));
        self.shapes.element("text", &[("x", &x), ("y", &y), ("text-anchor", anchor)], &Html::text(text));
    }

    fn rotated(&mut self, text: &str, x: f64, y: f64) {
        let turn = format!("translate({x:.1} {y:.1}) rotate(-90)");
        self.shapes.element("text", &[("transform", &turn), ("text-anchor", "middle")], &Html::text(text));
    }
}

fn count(number: usize) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axis::Unit;

    fn plot(points: Vec<Point>) -> Plot {
        let line = Line { name: "a <b>".into(), points, style: Style::Points, colour: 0 };
        let panel = Panel::new(Axis::linear("y", Unit::Time), vec![line]);
        Plot {
            title: "T & t".into(),
            description: "D".into(),
            x: Axis::log("x", Unit::Number),
            panels: vec![panel],
            width: WIDE,
        }
    }

    #[test]
    fn a_picture_has_words_and_no_markup_from_elsewhere() {
        let svg =
            plot(vec![Point::at(1.0, 2e6), Point { x: 8.0, y: 3e6, range: Some((1e6, 4e6)) }]).html("p1").into_string();
        for part in
            ["role=\"img\"", "<title id=\"p1-title\">T &amp; t</title>", "<desc id=", "a &lt;b&gt;: 2.00 ms at 1.00"]
        {
            assert!(svg.contains(part), "{part} is not in {svg}");
        }
        assert!(!svg.contains("<b>") && !svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn nothing_to_show_is_no_picture() {
        assert!(plot(Vec::new()).html("p").is_empty());
        assert!(plot(vec![Point::at(f64::NAN, 1.0)]).html("p").is_empty());
        let odd = plot(vec![Point::at(1.0, f64::INFINITY), Point::at(2.0, 1.0)]).html("p").into_string();
        assert!(!odd.contains("inf") || odd.contains("inf s"), "{odd}");
    }
}
