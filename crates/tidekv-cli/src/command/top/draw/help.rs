//! The keys and the signs, over the rest of the screen.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::Line;
use ratatui::widgets::{Block, Clear, Paragraph};

use super::theme::Theme;

const TEXT: &str = "\
q, Ctrl-C      leave                    h, ?     this help
s, S           next, previous order     r        turn the order round
/              filter by name           Esc      back; clear the filter
p, Space       pause the picture; looks go on behind it
Up, Down, j, k, PgUp, PgDn, Home, End   choose a pool
Enter          everything about it      Ctrl-Z   stop; fg comes back

Bar of a pool, up to its limit          Bar of a device (its budget)
#  in use, cached included              #  needed by running requests
=  idle reserve (Prealloc)              %  cached: given to neighbours
+  wanted and not given                 =  idle in pools
|  its fair share                       o  used by others (no budget)
-  free             >  over the limit   -  free

Colour: green below 50 % of the limit, yellow below 80 %, then red and !
State: live, draining (limit not applied yet), dead, returning (its
memory is on the way back), kvcached (not ours), gone (not there now)";

pub(super) fn draw(theme: Theme, frame: &mut Frame<'_>, area: Rect) {
    let lines: Vec<Line<'_>> = TEXT.lines().map(Line::raw).collect();
    let width = lines.iter().map(Line::width).max().unwrap_or(0) + 4;
    let box_area = centered(area, width, lines.len() + 2);
    let block = Block::bordered()
        .title(Line::styled(" Help ", theme.title()))
        .padding(ratatui::widgets::Padding::horizontal(1));
    frame.render_widget(Clear, box_area);
    frame.render_widget(Paragraph::new(lines).block(block), box_area);
}

/// In the middle, and no larger than there is room.
fn centered(area: Rect, width: usize, height: usize) -> Rect {
    let width = u16::try_from(width).unwrap_or(u16::MAX).min(area.width);
    let height = u16::try_from(height).unwrap_or(u16::MAX).min(area.height);
    Rect { x: area.x + (area.width - width) / 2, y: area.y + (area.height - height) / 2, width, height }
}
