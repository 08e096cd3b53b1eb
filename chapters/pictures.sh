#!/bin/sh
# Take the front page's pictures of two pages anew, with Chromium.
set -e
cd "$(dirname "$0")"
frame=$(mktemp --suffix=.html) # Chromium takes no picture of a page that has scrolled, but of one in a frame it does

taken() { # PICTURE PAGE WIDTH HEIGHT
    echo "<body style='margin: 0'><iframe src='file://$PWD/$2' style='width: $3px; height: $4px; border: 0'>" >"$frame"
    chromium --headless --no-sandbox --hide-scrollbars --virtual-time-budget=2000 --screenshot="$1" \
        --window-size="$3,$4" "file://$frame" 2>/dev/null
}

python3 ../gpt_kv_cache.py --max-new-tokens 40 --trace trace.html
taken trace.png "trace.html#37" 1100 560
taken side_by_side.png "side_by_side/gpt_kv_cache.html#3" 1560 640
rm "$frame"
