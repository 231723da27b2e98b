"""headwise.data.timeseries: what each format means, and that each wrong file is an error with file, line and cure."""

from __future__ import annotations

import gzip
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.data.samples import Series
from headwise.data.timeseries import read_series

TS = "@univariate false\n@dimensions 2\n@classLabel true walk run\n@data\n"
LONG = "series,time (ms),label,x,y\n"
FORMS = """one of two forms, told apart by a column `series`
  long, one row a position:  series,time (ms),label,acc_x,acc_y
                             walk1,0,walk,0.1,9.8
  wide, one row a series:    label,0,1,2
                             walk,0.1,0.2,0.4"""

# What is wrong: (the file, the error from behind the file's name on).
TS_ERRORS = {
    "missing channel": (
        TS + "1,2:3,4:walk\n1,2:run\n",
        (
            ", line 6: the series must have 2 channels and then a label, with ':' between, as @dimensions "
            "says; got 1 (cure: correct the series, or what the header says)"
        ),
    ),
    "channel too many": (
        TS + "1,2:3,4:5,6:walk\n",
        (
            ", line 5: the series must have 2 channels and then a label, with ':' between, as @dimensions "
            "says; got 3 (cure: correct the series, or what the header says)"
        ),
    ),
    "label missing": (
        TS + "1,2:3,4\n",
        (
            ", line 5: the series must have 2 channels and then a label, with ':' between, as @dimensions "
            "says; got 1 (cure: correct the series, or what the header says)"
        ),
    ),
    "only a label": (
        "@classLabel true 1 2\n@data\n1\n",
        (
            ", line 3: the series must have at least 1 channel and then a label, with ':' between; got 0 "
            "(cure: add what is missing)"
        ),
    ),
    "first line sets the channels": (
        "@classLabel true 1 2\n@data\n1:2:1\n\n1:1\n",
        (
            ", line 5: the series must have 2 channels and then a label, with ':' between, as line 3 "
            "says; got 1 (cure: correct the series, or what the header says)"
        ),
    ),
    "univariate": (
        "@univariate true\n@data\n1:2\n",
        (
            ", line 3: the series must have 1 channel, as @univariate says; got 2 (cure: correct the "
            "series, or what the header says)"
        ),
    ),
    "multivariate": (
        "@univariate false\n@data\n1,2\n",
        ", line 3: the series must have at least 2 channels; got 1 (cure: add what is missing)",
    ),
    "dimension": (
        "@dimension 3\n@data\n1:2\n",
        (
            ", line 3: the series must have 3 channels, as @dimensions says; got 2 (cure: correct the "
            "series, or what the header says)"
        ),
    ),
    "both claims": (
        "@univariate true\n@dimensions 2\n@data\n1:2\n",
        (
            ", line 4: the series must have 1 channel, as @univariate says; got 2 (cure: correct the "
            "series, or what the header says)"
        ),
    ),
    "unequal": (
        TS + "# c\n1,2:3:walk\n",
        ", line 6: channel 2 must hold 2 values, as channel 1; got 1 (cure: cut or fill it)",
    ),
    "unequal, longer": (
        TS + "1:3,4:walk\n",
        ", line 5: channel 2 must hold 1 value, as channel 1; got 2 (cure: cut or fill it)",
    ),
    "unequal, perhaps a label": (
        "@data\n1,2:1\n",
        (
            ", line 2: channel 2 must hold 2 values, as channel 1; got 1 (cure: cut or fill it; a label "
            "needs '@classLabel true ...')"
        ),
    ),
    "series length": (
        "@seriesLength 3\n@data\n1,2,3\n1,2\n",
        (
            ", line 4: the series must have 3 values in each channel, as @seriesLength says; got 2 (cure: "
            "correct the series, or what the header says)"
        ),
    ),
    "equal length": (
        "@equalLength true\n@data\n1,2,3\n1,2\n",
        (
            ", line 4: the series must have 3 values in each channel, as line 3 with @equalLength says; "
            "got 2 (cure: correct the series, or what the header says)"
        ),
    ),
    "empty channel": (
        TS + "1,2::walk\n",
        (
            ", line 5: channel 2 must hold at least one value; got none (cure: write its values, or "
            "delete the line if the series is empty)"
        ),
    ),
    "no values": (
        TS + ":1:walk\n",
        (
            ", line 5: channel 1 must hold at least one value; got none (cure: write its values, or "
            "delete the line if the series is empty)"
        ),
    ),
    "unknown label": (
        TS + "1:2:stand\n",
        (
            ", line 5: the label must be one of 'walk', 'run'; got 'stand' (cure: correct the label or "
            "the list of classes)"
        ),
    ),
    "empty label": (
        TS + "1:2:\n",
        ", line 5: the label must be one of 'walk', 'run'; got '' (cure: correct the label or the list of classes)",
    ),
    "label other spelling": (
        "@classLabel true 1 2\n@data\n1:1.0\n",
        ", line 3: the label must be one of '1', '2'; got '1.0' (cure: write it '1': labels are text)",
    ),
    "question mark": (
        TS + "1,2:3,?:walk\n",
        (
            ", line 5: channel 2, position 2 must hold a finite number; got '?' (cure: fill or drop that "
            "series; missing values are not read)"
        ),
    ),
    "nan": (
        TS + "1,2:NaN,3:walk\n",
        (
            ", line 5: channel 2, position 1 must hold a finite number; got 'NaN' (cure: fill or drop "
            "that series; missing values are not read)"
        ),
    ),
    "inf": (
        TS + "1,-inf:2,3:walk\n",
        (
            ", line 5: channel 1, position 2 must hold a finite number; got '-inf' (cure: fill or drop "
            "that series; missing values are not read)"
        ),
    ),
    "too great": (
        TS + "1,2:3,3.41e38:walk\n",
        (
            ", line 5: channel 2, position 2 must hold a finite number; got '3.41e38' (cure: write it as "
            "a number such as -2.5e-3; float32 ends at 3.4e38)"
        ),
    ),
    "underscore": (
        TS + "1_0:2:walk\n",
        (
            ", line 5: channel 1, position 1 must hold a finite number; got '1_0' (cure: write it as a "
            "number such as -2.5e-3; float32 ends at 3.4e38)"
        ),
    ),
    "other digits": (
        TS + "\u0661:2:walk\n",
        (
            ", line 5: channel 1, position 1 must hold a finite number; got '\u0661' (cure: write it as a "
            "number such as -2.5e-3; float32 ends at 3.4e38)"
        ),
    ),
    "trailing comma": (
        TS + "1,:2,3:walk\n",
        (
            ", line 5: channel 1, position 2 must hold a finite number; got '' (cure: fill or drop that "
            "series; missing values are not read)"
        ),
    ),
    "timestamps": (
        "@data\n(0,1),(1,2)\n",
        (
            ", line 2: channel 1, position 1 must hold a finite number; got '(0' (cure: leave the "
            "timestamps out; .ts is read without them)"
        ),
    ),
    "timeStamps true": (
        "@timeStamps TRUE\n@data\n1\n",
        (
            ", line 1: @timeStamps must be false; got true (cure: leave the timestamps out and say false, "
            "or write a long .csv with a column time)"
        ),
    ),
    "regression": (
        "@targetlabel true\n@data\n1:0.5\n",
        (
            ", line 1: @targetLabel must be false; got true (cure: this is a regression set; headwise "
            "reads classes: sort the targets into some, with @classLabel)"
        ),
    ),
    "typo": (
        "@univarate true\n@data\n1\n",
        (
            ", line 1: a tag must be one of @problemName, @timeStamps, @targetLabel, @missing, "
            "@univariate, @equalLength, @dimensions, @seriesLength, @classLabel, @data; got '@univarate' "
            "(cure: correct or delete it)"
        ),
    ),
    "bad flag": (
        "@missing maybe\n@data\n1\n",
        ", line 1: @missing must be true or false; got 'maybe' (cure: correct or delete it)",
    ),
    "flag empty": (
        "@equalLength\n@data\n1\n",
        ", line 1: @equalLength must be true or false; got '' (cure: correct or delete it)",
    ),
    "bad count": (
        "@dimensions 0\n@data\n1\n",
        ", line 1: @dimensions must be a count of at least 1; got '0' (cure: correct or delete it)",
    ),
    "bad count 2": (
        "@seriesLength 3.5\n@data\n1\n",
        ", line 1: @seriesLength must be a count of at least 1; got '3.5' (cure: correct or delete it)",
    ),
    "class list empty": (
        "@classLabel true\n@data\n1:1\n",
        (
            ", line 1: @classLabel must be false, or true and different classes; got 'true' (cure: write "
            "'@classLabel true walk run', or '@classLabel false' for a file without labels)"
        ),
    ),
    "class list twice": (
        "@classLabel true a b a\n@data\n1:a\n",
        (
            ", line 1: @classLabel must be false, or true and different classes; got 'true a b a' (cure: "
            "write '@classLabel true walk run', or '@classLabel false' for a file without labels)"
        ),
    ),
    "class list of false": (
        "@classLabel false a\n@data\n1:a\n",
        (
            ", line 1: @classLabel must be false, or true and different classes; got 'false a' (cure: "
            "write '@classLabel true walk run', or '@classLabel false' for a file without labels)"
        ),
    ),
    "class neither": (
        "@classLabel a b\n@data\n1:a\n",
        (
            ", line 1: @classLabel must be false, or true and different classes; got 'a b' (cure: write "
            "'@classLabel true walk run', or '@classLabel false' for a file without labels)"
        ),
    ),
    "tag twice": (
        "@dimensions 2\n@dimension 3\n@data\n1:2\n",
        ", line 2: @dimensions must be '2', as in line 1; got '3' (cure: delete one of them)",
    ),
    "data and more": (
        "@data 1,2\n1\n",
        ", line 1: @data must stand alone; got '@data 1,2' (cure: begin the data in the next line)",
    ),
    "no @data": (
        "@univariate true\n",
        " must have a line @data; got none (cure: write @data between the tags and the data)",
    ),
    "only comments": (
        "# nothing\n",
        " must have a line @data; got none (cure: write @data between the tags and the data)",
    ),
    "no series": (
        TS,
        " must hold at least one series; got none (cure: add the data after the header)",
    ),
    "csv as ts": (
        "series,a\nx,1\n",
        (
            ", line 1: a line before @data must be a tag (@...) or a comment (#...); got 'series,a' "
            "(cure: the data comes after @data; a table with a header line has the suffix .csv)"
        ),
    ),
    "arff": (
        "% c\n@RELATION x\n@attribute a numeric\n@data\n1\n",
        ", line 2 must be .ts; got an ARFF file: '@RELATION x' (cure: take the set's .ts file instead)",
    ),
    "long garbage": (
        "x" * 5000 + "\n",
        (
            ", line 1: a line before @data must be a tag (@...) or a comment (#...); got "
            "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...' (cure: the data comes after "
            "@data; a table with a header line has the suffix .csv)"
        ),
    ),
}

CSV_ERRORS = {
    "not contiguous": (
        "series,x\na,1\nb,2\nb,3\na,4\n",
        (
            ", line 5: the row must stand with the others of series 'a', which begins in line 2; got "
            "another series in line 4 (cure: sort the rows by series; if this is another recording, give it "
            "another name)"
        ),
    ),
    "label changes": (
        LONG + "a,0,walk,1,2\na,1,run,1,2\n",
        (
            ", line 3: the label must be 'walk', as in line 2; got 'run' (cure: give each row of a series "
            "its one label; without labels, drop the column)"
        ),
    ),
    "label empty": (
        LONG + "a,0,,1,2\n",
        (
            ", line 2: the label must be the class of the series; got '' (cure: give each row of a series "
            "its one label; without labels, drop the column)"
        ),
    ),
    "label later empty": (
        LONG + "a,0,walk,1,2\na,1, ,1,2\n",
        (
            ", line 3: the label must be 'walk', as in line 2; got '' (cure: give each row of a series "
            "its one label; without labels, drop the column)"
        ),
    ),
    "some unlabelled": (
        LONG + "a,0,walk,1,2\nb,1,,1,2\n",
        (
            ", line 3: the label must be the class of the series; got '' (cure: give each row of a series "
            "its one label; without labels, drop the column)"
        ),
    ),
    "no id": (
        "series,x\n ,1\n",
        ", line 2: the cell of 'series' must name the series; got nothing (cure: write its name in each row)",
    ),
    "gap": (
        LONG + "a,0,walk,1,2\na,10,walk,1,2\na,40.0,walk,1,2\n",
        (
            ", line 4: the time must rise by about 10 a row, as in line 3; got 30.0, from 10 to 40.0 (cure: "
            "resample to even steps, split the series at a gap, or drop the column)"
        ),
    ),
    "gap between rounded stamps": (
        LONG + "".join(f"a,{time},walk,1,2\n" for time in ["0.000", "0.017", "0.033", "0.05", "0.083", "0.100"]),
        (
            ", line 6: the time must rise by about 0.017 a row, as in line 3; got 0.033, from 0.05 to 0.083 (cure: "
            "resample to even steps, split the series at a gap, or drop the column)"
        ),
    ),
    "gap between nanoseconds": (
        LONG + "a,1700000000000000001,walk,1,2\na,1700000000010000001,walk,1,2\na,1700000000020000001,walk,1,2\n"
        "a,1700000000030100001,walk,1,2\n",
        (
            ", line 5: the time must rise by about 10000000 a row, as in line 3; got 10100000, from "
            "1700000000020000001 to 1700000000030100001 (cure: resample to even steps, split the series at a gap, "
            "or drop the column)"
        ),
    ),
    "too coarse to tell a gap": (
        LONG + "a,0,walk,1,2\na,1,walk,1,2\na,2,walk,1,2\na,4,walk,1,2\na,5,walk,1,2\n",
        (
            ", line 5: the time must rise by about 1 a row, as in line 3; got 2, from 2 to 4 (cure: write the time "
            "with more digits: with these, a gap looks like a rounded step; or resample to even steps, split the "
            "series at a gap, or drop the column)"
        ),
    ),
    "uneven in another series": (
        LONG + "a,0,walk,1,2\na,10,walk,1,2\nb,0,walk,1,2\nb,20,walk,1,2\n",
        (
            ", line 5: the time must rise by about 10 a row, as in line 3; got 20, from 0 to 20 (cure: resample to "
            "even steps, split the series at a gap, or drop the column)"
        ),
    ),
    "another rate in another series": (
        LONG + "".join(f"{name},{step * at},walk,1,2\n" for name, step in (("a", 10), ("b", 11)) for at in range(10)),
        (
            ", line 11: the time must rise by about 10.5 a row in each series, as in all together; got 10, from 0 to "
            "90 (cure: resample all series to the same step, or drop the column)"
        ),
    ),
    "too many digits": (
        LONG + "a,0,walk,1,2\na,1e-400,walk,1,2\n",
        (
            ", line 3: the time must differ from the row before by a number of at most 100 digits; got 1e-400 after "
            "0 (cure: write fewer digits)"
        ),
    ),
    "not increasing": (
        LONG + "a,10,walk,1,2\na,10.0,walk,1,2\n",
        (
            ", line 3: the time must be above 10, the row before; got 10.0 (cure: delete the row, or write the time "
            "more exactly)"
        ),
    ),
    "decreasing": (
        LONG + "a,1700000000000000002,walk,1,2\na,1700000000000000001,walk,1,2\n",
        (
            ", line 3: the time must be above 1700000000000000002, the row before; got 1700000000000000001 (cure: "
            "sort the rows of each series by time)"
        ),
    ),
    "date": (
        LONG + "a,2024-01-01,walk,1,2\n",
        (
            ", line 2: column 'time (ms)' must hold a finite number; got '2024-01-01' (cure: write a date "
            "or a time as one number, such as the seconds from the start)"
        ),
    ),
    "clock": (
        LONG + "a,12:30,walk,1,2\n",
        (
            ", line 2: column 'time (ms)' must hold a finite number; got '12:30' (cure: write a date or a "
            "time as one number, such as the seconds from the start)"
        ),
    ),
    "time missing": (
        LONG + "a,,walk,1,2\n",
        (
            ", line 2: column 'time (ms)' must hold a finite number; got '' (cure: fill or drop that "
            "series; missing values are not read)"
        ),
    ),
    "two times": (
        "series,time,Time (s),x\na,0,0,1\n",
        (
            ", line 1: the column of the time must be one, named time or time (UNIT); got 'time', 'Time "
            "(s)' (cure: give that name to the time and to nothing else; one that is a channel needs another word)"
        ),
    ),
    "like a time": (
        "series,time_ms,x\na,0,1\n",
        (
            ", line 1: the column of the time must be one, named time or time (UNIT); got 'time_ms' "
            "(cure: give that name to the time and to nothing else; one that is a channel needs another word)"
        ),
    ),
    "timestamp": (
        "series,Timestamp,x\na,0,1\n",
        (
            ", line 1: the column of the time must be one, named time or time (UNIT); got 'Timestamp' "
            "(cure: give that name to the time and to nothing else; one that is a channel needs another word)"
        ),
    ),
    "time ()": (
        "series,time (),x\na,0,1\n",
        (
            ", line 1: the column of the time must be one, named time or time (UNIT); got 'time ()' "
            "(cure: give that name to the time and to nothing else; one that is a channel needs another word)"
        ),
    ),
    "like a label": (
        "series,Class,x,Target\na,0,1,2\n",
        (
            ", line 1: the column of the class must be named label; got 'Class', 'Target' (cure: name it label or "
            "delete it; if it is a channel, give it another word)"
        ),
    ),
    "like a label, wide": (
        "0,1,class\n1,2,walk\n",
        (
            ", line 1: the column of the class must be named label; got 'class' (cure: name it label or delete it; "
            "if it is a channel, give it another word)"
        ),
    ),
    "missing": (
        LONG + "a,0,walk,1,\n",
        (
            ", line 2: column 'y' must hold a finite number; got '' (cure: fill or drop that series; "
            "missing values are not read)"
        ),
    ),
    "n/a": (
        LONG + "a,0,walk,1,2\na,10,walk,n/a,2\n",
        (
            ", line 3: column 'x' must hold a finite number; got 'n/a' (cure: fill or drop that series; "
            "missing values are not read)"
        ),
    ),
    "nan": (
        LONG + "a,0,walk,nan,2\n",
        (
            ", line 2: column 'x' must hold a finite number; got 'nan' (cure: fill or drop that series; "
            "missing values are not read)"
        ),
    ),
    "inf": (
        LONG + "a,0,walk,inf,2\n",
        (
            ", line 2: column 'x' must hold a finite number; got 'inf' (cure: fill or drop that series; "
            "missing values are not read)"
        ),
    ),
    "too great": (
        LONG + "a,0,walk,1e39,2\n",
        (
            ", line 2: column 'x' must hold a finite number; got '1e39' (cure: write it as a number such "
            "as -2.5e-3; float32 ends at 3.4e38)"
        ),
    ),
    "decimal comma": (
        LONG + 'a,0,walk,"1,5",2\n',
        ", line 2: column 'x' must hold a finite number; got '1,5' (cure: write a decimal point)",
    ),
    "decimal comma unquoted": (
        LONG + "a,0,walk,1,5,2\n",
        (
            ", line 2: the row must have 5 cells, as the header; got 6 (cure: add or delete cells; a "
            "decimal comma must be a point, a comma in text needs quotes)"
        ),
    ),
    "one cell": (
        "0\n1,2\n",
        (
            ", line 2: the row must have 1 cell, as the header; got 2 (cure: add or delete cells; a "
            "decimal comma must be a point, a comma in text needs quotes)"
        ),
    ),
    "label and class, wide": (
        "0,class,label\n1,2,walk\n",
        (
            ", line 1: the header must have a column `series`, or, besides "
            "`label`, only columns numbered on from 0 or 1 with one prefix; got 'class' (cure: write FORMS)"
        ),
    ),
    "cells": (
        LONG + "a,0,walk,1,2\n\na,10,walk,1\n",
        (
            ", line 4: the row must have 5 cells, as the header; got 4 (cure: add or delete cells; a "
            "decimal comma must be a point, a comma in text needs quotes)"
        ),
    ),
    "unclosed quote": (
        LONG + 'a,0,walk,1,2\n"a,10,walk,1,2\na,20,walk,1,2\n',
        (
            ", line 3: the row must be valid CSV; got unexpected end of data (cure: close each quote, and "
            "write a quote inside a quoted cell twice)"
        ),
    ),
    "after quote": (
        LONG + '"a"b,0,walk,1,2\n',
        (
            ", line 2: the row must be valid CSV; got ',' expected after '\"' (cure: close each quote, "
            "and write a quote inside a quoted cell twice)"
        ),
    ),
    "empty name": (
        ",series,x\n0,a,1\n",
        (
            ", line 1: the name of column 1 must not be empty; got nothing (cure: name it; pandas leaves "
            "it out with to_csv(index=False))"
        ),
    ),
    "name twice": (
        "series,x,x\na,1,2\n",
        ", line 1: each name must stand once; got 'x' again (cure: rename one of the columns)",
    ),
    "series twice": (
        "series,Series,x\na,b,2\n",
        ", line 1: each name must stand once; got 'Series' again (cure: rename one of the columns)",
    ),
    "no channel": (
        "series,label,time\na,b,1\n",
        ", line 1: the header must name at least one channel; got none (cure: write FORMS)",
    ),
    "semicolon": (
        "series;x\na;1\n",
        (
            ", line 1: the header must have commas between its columns; got 'series;x' (cure: export it "
            "with the delimiter ,)"
        ),
    ),
    "tab": (
        "series\tx\na\t1\n",
        (
            ", line 1: the header must have commas between its columns; got 'series\\tx' (cure: export it "
            "with the delimiter ,)"
        ),
    ),
    "no header": (
        "0.5,0.25\n1,2\n",
        ", line 1: the header must be names of columns; got '0.5,0.25' (cure: write a first line, of FORMS)",
    ),
    "ts as csv": (
        TS + "1:2:walk\n",
        (
            ", line 1: the header must be names of columns; got '@univariate false' (cure: a .ts file "
            "needs the suffix .ts; a .csv has no comments, and no ARFF file is read)"
        ),
    ),
    "neither form": (
        "x,y\n1,2\n",
        (
            ", line 1: the header must have a column `series`, or, besides `label`, only columns numbered "
            "on from 0 or 1 with one prefix; got 'x' (cure: write FORMS)"
        ),
    ),
    "only label": (
        "label\nwalk\n",
        (
            ", line 1: the header must have a column `series`, or, besides `label`, only columns numbered "
            "on from 0 or 1 with one prefix; got 'nothing else' (cure: write FORMS)"
        ),
    ),
    "number left out": (
        "t0,t1,t3\n1,2,3\n",
        (
            ", line 1: the header must have a column `series`, or, besides `label`, only columns numbered "
            "on from 0 or 1 with one prefix; got 't3' (cure: write FORMS)"
        ),
    ),
    "prefixes": (
        "t0,u1\n1,2\n",
        (
            ", line 1: the header must have a column `series`, or, besides `label`, only columns numbered "
            "on from 0 or 1 with one prefix; got 'u1' (cure: write FORMS)"
        ),
    ),
    "from 2": (
        "label,2,3\na,1,2\n",
        (
            ", line 1: the header must have a column `series`, or, besides `label`, only columns numbered "
            "on from 0 or 1 with one prefix; got '2' (cure: write FORMS)"
        ),
    ),
    "order": (
        "1,0\n1,2\n",
        (
            ", line 1: the header must have a column `series`, or, besides `label`, only columns numbered "
            "on from 0 or 1 with one prefix; got '0' (cure: write FORMS)"
        ),
    ),
    "wide missing": (
        "label,0,1,2\nwalk,1,,3\n",
        (
            ", line 2: column '1' must hold a finite number; got '' (cure: fill or drop that series; "
            "missing values are not read)"
        ),
    ),
    "wide empty": (
        "label,0,1,2\nwalk,1,2,3\nrun,,,\n",
        ", line 3: the series must hold at least one value; got none (cure: write its values or delete the row)",
    ),
    "wide label empty": (
        "0,1,label\n1,2,\n",
        (
            ", line 2: the label must be the class of the series; got '' (cure: give each row of a series "
            "its one label; without labels, drop the column)"
        ),
    ),
    "wide text": (
        "0,1\n1,x\n",
        (
            ", line 2: column '1' must hold a finite number; got 'x' (cure: fill or drop that series; "
            "missing values are not read)"
        ),
    ),
    "no rows": (
        LONG,
        " must hold at least one series; got none (cure: add the data after the header)",
    ),
    "long garbage": (
        "x" * 5000 + "\n",
        (
            ", line 1: the header must have a column `series`, or, besides `label`, only columns numbered "
            "on from 0 or 1 with one prefix; got "
            "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...' (cure: write FORMS)"
        ),
    ),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder, so that a bare file name is the path as the caller gives it."""
    monkeypatch.chdir(tmp_path)


def _read(name: str, content: str | bytes, **arguments: tuple[str, ...] | None) -> Series:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return read_series(name, **arguments)


def _error(name: str, content: str | bytes, **arguments: tuple[str, ...]) -> str:
    with pytest.raises(ValueError, match=r"^read_series: ") as caught:
        _read(name, content, **arguments)
    return str(caught.value)


def _values(series: Series) -> list[list[list[float]]]:
    assert all(value_LX.dtype == torch.float32 and value_LX.is_contiguous() for value_LX in series.values)
    return [value_LX.tolist() for value_LX in series.values]


@pytest.mark.parametrize("case", TS_ERRORS)
def test_wrong_ts(case: str) -> None:
    content, message = TS_ERRORS[case]
    assert _error("f.ts", content) == "read_series: f.ts" + message


@pytest.mark.parametrize("case", CSV_ERRORS)
def test_wrong_csv(case: str) -> None:
    content, message = CSV_ERRORS[case]
    assert _error("f.csv", content) == "read_series: f.csv" + message.replace("FORMS", FORMS)


def test_ts() -> None:
    content = TS + "0.5,-2,4:9,8,7:walk\n\n# a remark\n% another\n1e-3:.5:run\n +1 , 2 : 3,4 : walk \n"
    series = _read("gait.ts", "# about\n@problemName a name\n@problemName another\n" + content)
    assert _values(series) == [
        [[0.5, 9], [-2, 8], [4, 7]],
        [[pytest.approx(1e-3), 0.5]],
        [[1, 3], [2, 4]],
    ]
    assert series.labels is not None
    assert (series.labels.tolist(), series.class_names) == ([0, 1, 0], ("walk", "run"))
    assert (series.channel_names, series.names) == (("1", "2"), ("0", "1", "2"))
    assert (series.interval, series.unit) == (1.0, "step")


def test_ts_keeps_classes_that_no_series_has() -> None:
    series = _read("a.ts", "@classLabel true c b a\n@data\n1:a\n")
    assert series.labels is not None
    assert (series.class_names, series.labels.tolist()) == (("c", "b", "a"), [2])


@pytest.mark.parametrize("tag", ["@classLabel false\n", "@CLASSLABEL False\n@targetLabel false\n", ""])
def test_ts_without_labels(tag: str) -> None:
    series = _read("a.ts", tag + "@data\n1,2:3,4\n")
    assert (series.labels, series.class_names) == (None, ())
    assert _values(series) == [[[1, 3], [2, 4]]]


def test_ts_tags_in_any_case_that_hold() -> None:
    header = (
        "@PROBLEMNAME x\n@timestamps FALSE\n@Missing true\n@univariate\tfalse\n@dimension 2\n@Dimensions 2\n"
        "@equallength TRUE\n@serieslength 2\n@classlabel TRUE a\n@DATA\n"
    )
    assert _values(_read("a.TS", header + "1,2:3,4:a\n")) == [[[1, 3], [2, 4]]]


def test_long_csv() -> None:
    series = _read("gait.csv", LONG + "b,0,walk,1,2\nb,10,walk,3,4\na,5,run,5,6\na,15,run,7,8\na,25,run,9,10\n")
    assert _values(series) == [[[1, 2], [3, 4]], [[5, 6], [7, 8], [9, 10]]]
    assert series.labels is not None
    assert (series.class_names, series.labels.tolist()) == (("run", "walk"), [1, 0])
    assert (series.names, series.channel_names) == (("b", "a"), ("x", "y"))
    assert (series.interval, series.unit) == (10.0, "ms")


def test_long_csv_least() -> None:
    """Neither time nor label; a channel that is a number does not make it wide."""
    series = _read("a.csv", "1,Series\n5,a\n6,a\n7,b")
    assert _values(series) == [[[5], [6]], [[7]]]
    assert (series.labels, series.class_names, series.channel_names) == (None, (), ("1",))
    assert (series.interval, series.unit) == (1.0, "step")


@pytest.mark.parametrize(
    ("column", "times", "known"),
    [
        ("time", "0 6.4 12.8", (6.4, "time")),
        ("TIME ( s )", "1.5 2 2.5", (0.5, "s")),
        ("Time(ms)", "0 10.001 20", (10.0, "ms")),
        ("time (s)", "1700000000.01 1700000000.02 1700000000.03", (pytest.approx(0.01, rel=2e-6), "s")),
        ("time (s)", "-1 0 1", (1.0, "s")),
    ],
)
def test_time(column: str, times: str, known: tuple[float, str]) -> None:
    series = _read("a.csv", f"x,{column},series\n" + "".join(f"1,{time},a\n" for time in times.split()))
    assert (series.interval, series.unit) == known
    assert series.channel_names == ("x",)


@pytest.mark.parametrize(
    ("series", "interval"),
    [
        (["0.000 0.017 0.033 0.050"], 0.0166667),
        (["0.000 0.033 0.067"], 0.0335),
        (["0 0.033 0.067 0.1 0.133 0.167 0.2"], 0.0333333),  # as pandas leaves zeros out
        (["0 17 33 50", "5 22 38", "1 18"], 16.6667),
        (["0 17", *["0 17"] * 9, "0 17 33 50 67 83 100 117 133 150 167 183 200"], 16.8182),
        (["0.000000e+00 1.666667e-02 3.333333e-02", "9.998333e+03 1.000002e+04 1.000003e+04"], None),
        ([" ".join(f"{at / 60:.6g}" for at in range(6100))], 0.0166667),  # 6 digits, whichever the decimals
        ([*["0 5"] * 9, "0 5 11 16 22 27"], 5.14286),  # the short ones pull the mean, all in one direction
        (["0.001 4.001 8 13 16 20.001"], None),  # 8 is 8.000 here
        (["10 20 31"], 10.5),
        (["1700000000000000000 1700000000016666667 1700000000033333333"], 16666666.5),
        (["1700000000.000000000001 1700000000.000000000002 1700000000.000000000003"], 1e-12),
        (["0.1 0.2 0.30000000000000004 0.4"], 0.1),
        (["-1e-50 0 1e-50"], 1e-50),
    ],
)
def test_rounded_time(series: list[str], interval: float | None) -> None:
    content = "series,time,x\n" + "".join(
        f"{name},{time},1\n" for name, times in enumerate(series) for time in times.split()
    )
    if interval is None:
        assert "the time" in _error("a.csv", content)
    else:
        assert _read("a.csv", content).interval == float(f"{interval:.6g}")


LIKE_TIME = (
    "t T times t_ms ts t(s) Timestamp timestamp_ns timeStamps date DateTime seconds ms hours epoch elapsed "
    "elapsed_time unixTime time_ms time[s] timems time_x time-of-day date_y"
)


@pytest.mark.parametrize("name", LIKE_TIME.split())
def test_columns_like_a_time(name: str) -> None:
    for header in (f"series,{name},x", f"x,series,time,{name}"):
        line = ",".join("1" * len(header.split(",")))
        assert "the column of the time must be one, named time" in _error("a.csv", f"{header}\n{line}\n")
    series = _read("a.csv", f"series,{name},time (s),x\na,5,0,1\n", channel_names=("x", name))
    assert _values(series) == [[[1, 5]]]


@pytest.mark.parametrize(
    "name", ["T (K)", "t1", "t_min", "timer", "temperature", "update", "s", "us", "hour", "clock_hz"]
)
def test_columns_not_like_a_time(name: str) -> None:
    assert _read("a.csv", f"series,{name}\na,5\n").channel_names == (name,)


@pytest.mark.parametrize("name", ["class", "CLASSES", "class_id", "target", "category", "labels", "ground truth", "y"])
def test_columns_like_a_label(name: str) -> None:
    message = f"the column of the class must be named label; got '{name}'"
    assert message in _error("a.csv", f"series,{name},acc\na,5,1\n")
    for header, channels in ((f"series,{name},acc", (name, "acc")), (f"label,series,{name},acc", None)):
        series = _read("a.csv", f"{header}\n{','.join('1' * len(header.split(',')))}\n", channel_names=channels)
        assert series.channel_names == (name, "acc")


@pytest.mark.parametrize("names", ["y", "x,y", "Y,z,X", "y0,acc", "classy,subclass"])
def test_columns_not_like_a_label(names: str) -> None:
    series = _read("a.csv", f"series,time,{names}\n1,{','.join('1' * len(('time,' + names).split(',')))}\n")
    assert series.channel_names == tuple(names.split(","))


def test_blanks_around_time() -> None:
    assert _read("a.csv", "series,time,x\na, 0 ,1\na,\t10\t,1\n").interval == 10


def test_time_needs_two_positions() -> None:
    series = _read("a.csv", "series,time (ms),x\na,7,1\nb,3,2\n")
    assert (series.interval, series.unit) == (1.0, "step")


@pytest.mark.parametrize("names", ["0,1,2", "1,2,3", "t0,t1,t2", "dim_1,dim_2,dim_3", "t1_000,t1_001,t1_002"])
def test_wide_csv(names: str) -> None:
    series = _read("a.csv", f"label,{names}\nb,1,2,3\na,4,,\nb,5,6,\t\n")
    assert _values(series) == [[[1], [2], [3]], [[4]], [[5], [6]]]
    assert series.labels is not None
    assert (series.class_names, series.labels.tolist()) == (("a", "b"), [1, 0, 1])
    assert (series.names, series.channel_names, series.unit) == (("0", "1", "2"), ("1",), "step")


def test_wide_csv_label_anywhere_or_nowhere() -> None:
    last, none = _read("a.csv", "0,1,Label\n1,2,a\n3,4,a\n"), _read("b.csv", "0,1\n1,2\n3,4\n")
    assert _values(last) == _values(none) == [[[1], [2]], [[3], [4]]]
    assert (last.class_names, none.class_names, none.labels) == (("a",), (), None)


def test_quotes_in_csv() -> None:
    series = _read("a.csv", 'series, "label","a ""b"", c"\n"x, y","wa\nlk","1"\n"x, y","wa\nlk",2\nz,run,3\n')
    assert (series.names, series.class_names, series.channel_names) == (("x, y", "z"), ("run", "wa\nlk"), ('a "b", c',))
    assert _values(series) == [[[1], [2]], [[3]]]


def test_the_line_of_a_row_is_its_first() -> None:
    assert ", line 5: column 'x'" in _error("a.csv", 'series,label,x\n"a","wa\nlk",1\n\n"b","wa\nlk",?\n')


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_ends_and_byte_order_mark(end: str, mark: bytes) -> None:
    texts = {"a.ts": TS + "1:2:walk\n3:4:run\n", "a.csv": LONG + "a,0,walk,1,2\nb,0,run,3,4\n"}
    for name, text in texts.items():
        series = _read(name, mark + text.replace("\n", end).encode())
        assert _values(series) == [[[1, 2]], [[3, 4]]]
        wrong = text.replace("4", "?").replace("\n", end).encode()
        assert f", line {6 if name == 'a.ts' else 3}: " in _error(name, mark + wrong)


def test_only_line_ends_end_a_line() -> None:
    """str.splitlines would also split at a form feed and at U+2028, and no editor would count as it does."""
    assert "f.ts, line 5: channel 1, position 1" in _error(
        "f.ts", "# \f \u2028 \x1c\n" + TS[TS.index("@class") :] + "\n?:walk"
    )
    assert "f.csv, line 3: column 'x'" in _error("f.csv", "series,x\na\u2028\fb,1\nb,?\n")


@pytest.mark.parametrize(
    ("labels", "order"),
    [
        ("10 9 -1 1e1", ("-1", "9", "10", "1e1")),
        ("1.0 1 0", ("0", "1", "1.0")),
        ("10 9 b", ("10", "9", "b")),
        ("10 9 nan", ("10", "9", "nan")),
        ("b a B", ("B", "a", "b")),
    ],
)
def test_class_order(labels: str, order: tuple[str, ...]) -> None:
    series = _read("a.csv", "label,0\n" + "".join(f"{label},1\n" for label in labels.split()))
    assert series.labels is not None
    assert series.class_names == order
    assert [order[label] for label in series.labels.tolist()] == labels.split()


def test_class_names_decide_the_order() -> None:
    known = ("run", "stand", "walk")
    for name, content in {"a.ts": TS + "1:2:walk\n3:4:run\n", "a.csv": "label,0\nwalk,1\nrun,2\n"}.items():
        series = _read(name, content, class_names=known)
        assert series.labels is not None
        assert (series.class_names, series.labels.tolist()) == (known, [2, 0])


def test_class_names_without_labels() -> None:
    series = _read("a.csv", "0\n1\n", class_names=("a", "b"))
    assert (series.labels, series.class_names) == (None, ())


def test_labels_outside_class_names() -> None:
    cure = "(cure: correct the label or the list of classes)"
    message = f"read_series: a.csv, line 4: the label must be one of 'run', 'sit'; got 'walk' {cure}"
    assert _error("a.csv", LONG + "a,0,run,1,2\na,1,run,1,2\nb,0,walk,1,2\n", class_names=("run", "sit")) == message
    message = f"read_series: a.ts, line 6: the label must be one of 'run', 'sit'; got 'walk' {cure}"
    assert _error("a.ts", TS + "1:2:run\n1:2:walk\n", class_names=("run", "sit")) == message
    assert "got '1.0' (cure: write it '1': labels are text)" in _error("b.csv", "label,0\n1.0,2\n", class_names=("1",))


def test_many_classes_are_not_all_listed() -> None:
    known = tuple(str(index) for index in range(1000))
    message = _error("a.csv", "label,0\nx,1\n", class_names=known)
    assert "'18', '19', ... (1000 in all); got 'x'" in message
    assert "'20'" not in message


def test_channel_names_take_columns_by_name() -> None:
    series = _read("a.csv", LONG + "a,0,walk,1,2\na,1,walk,3,4\n", channel_names=("y", "x"))
    assert series.channel_names == ("y", "x")
    assert _values(series) == [[[2, 1], [4, 3]]]


@pytest.mark.parametrize(
    ("names", "got"),
    [
        (("x", "y", "z"), "the channels 'x', 'y', 'z'; got 'x', 'y'; missing: 'z'"),
        (("y",), "the channels 'y'; got 'x', 'y'; more: 'x'"),
        (("X", "y"), "the channels 'X', 'y'; got 'x', 'y'; missing: 'X'; more: 'x'"),
    ],
)
def test_channel_names_that_the_columns_are_not(names: tuple[str, ...], got: str) -> None:
    message = f"read_series: a.csv, line 1: the header must have {got} (cure: rename, add or delete columns)"
    assert _error("a.csv", LONG + "a,0,walk,1,2\n", channel_names=names) == message


def test_channel_names_where_the_file_has_none() -> None:
    assert _read("a.ts", TS + "1:2:walk\n", channel_names=("x", "y")).channel_names == ("x", "y")
    assert _read("a.csv", "0,1\n1,2\n", channel_names=("x",)).channel_names == ("x",)
    cure = "(cure: give the channels that these names belong to)"
    message = f"read_series: a.ts must hold 3 channels, as channel_names: 'x', 'y', 'z'; got 2 {cure}"
    assert _error("a.ts", TS + "1:2:walk\n", channel_names=("x", "y", "z")) == message
    message = f"read_series: a.csv must hold 2 channels, as channel_names: 'x', 'y'; got 1 {cure}"
    assert _error("a.csv", "0,1\n1,2\n", channel_names=("x", "y")) == message
    message = f"read_series: a.ts must hold 1 channel, as channel_names: 'x'; got 2 {cure}"
    assert _error("a.ts", TS + "1:2:walk\n", channel_names=("x",)) == message


@pytest.mark.parametrize("argument", ["class_names", "channel_names"])
@pytest.mark.parametrize("names", [(), ("a", "a"), "ab", (1, 2)])
def test_wrong_names(argument: str, names: tuple[str, ...]) -> None:
    message = f"read_series: {argument} must be at least one text, no two the same; or None; got {names!r}"
    assert _error("a.csv", "0\n1\n", **{argument: names}) == message


def test_values_are_those_of_float32() -> None:
    cells = "0.1", "3.4028235e38", "-3.40282356e38", "1e-46", "-0.0", "1E5", " 7\t", "16777217"
    series = _read("a.ts", "@data\n" + ",".join(cells) + "\n")
    expected = torch.tensor([float(cell) for cell in cells], dtype=torch.float32)
    assert expected.isfinite().all()
    assert torch.equal(series.values[0][:, 0], expected)
    assert "position 2 must hold a finite number; got '3.4028236e38'" in _error("b.ts", "@data\n1,3.4028236e38\n")


def test_great_values_that_only_their_sum_makes_too_great() -> None:
    assert _values(_read("a.csv", "0,1\n3e38,3e38\n")) == [[[pytest.approx(3e38)], [pytest.approx(3e38)]]]


def _zip() -> bytes:
    with zipfile.ZipFile("z", "w") as file:
        file.writestr("a.csv", "0\n1\n")
    return Path("z").read_bytes()


@pytest.mark.parametrize("suffix", [".ts", ".csv"])
@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"\x89PNG\r\n\x1a\n\0", " must be UTF-8 text; got a PNG picture"),
        (None, " must be UTF-8 text; got a ZIP archive (.zip, .xlsx, .npz or .pt)"),
        (gzip.compress(b"0\n1\n", mtime=0), " must be UTF-8 text; got a gzip archive"),
        (b"%PDF-1.7\n", " must be UTF-8 text; got a PDF document"),
        (b"\x89HDF\r\n\x1a\n", " must be UTF-8 text; got an HDF5 file"),
        (b"PAR1\x15", " must be UTF-8 text; got a Parquet file"),
        (b"\x93NUMPY\x01\0", " must be UTF-8 text; got a NumPy array (.npy)"),
        ("0\n1\n".encode("utf-16"), " must be UTF-8 text; got UTF-16 text"),
        (b"0\n1\n\0\0", ", line 3 must be UTF-8 text; got a NUL byte, as in binary files"),
        ("label,0\ngr\u00fcn,1\n".encode("latin-1"), ", line 2 must be UTF-8 text; got the byte 0xfc"),
        (b"\xef\xbb\xbflabel,0\n\n\xff,1\n", ", line 3 must be UTF-8 text; got the byte 0xff"),
    ],
)
def test_not_text(suffix: str, content: bytes | None, got: str) -> None:
    cure = " (cure: export the data as .csv or .ts, in UTF-8)"
    assert _error("f" + suffix, _zip() if content is None else content) == f"read_series: f{suffix}{got}{cure}"


@pytest.mark.parametrize("content", ["", "\n \r\n\t", "\ufeff"])
@pytest.mark.parametrize("name", ["f.ts", "f.csv"])
def test_empty(name: str, content: str) -> None:
    message = (
        f"read_series: {name} must hold at least one series; got an empty file (cure: write a header and the data)"
    )
    assert _error(name, content) == message


@pytest.mark.parametrize(
    ("name", "suffix"), [("a.txt", ".txt"), ("a.ts.gz", ".gz"), ("a", "no suffix"), ("", "no suffix")]
)
def test_other_suffixes(name: str, suffix: str) -> None:
    cure = "(cure: convert it, or rename it if it is one of the two)"
    with pytest.raises(ValueError, match="suffix") as caught:
        read_series(name)
    assert str(caught.value) == f"read_series: {name} must have the suffix .ts or .csv; got '{suffix}' {cure}"


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("gone.csv", "No such file or directory"),
        ("folder.ts", "Is a directory"),
        ("a\0.csv", "embedded null byte"),
        ("n" * 300 + ".csv", "File name too long"),
    ],
)
def test_not_a_file_that_can_be_read(name: str, got: str) -> None:
    Path("folder.ts").mkdir()
    with pytest.raises(ValueError, match="can be read") as caught:
        read_series(name)
    cure = "(cure: check the path and its permissions)"
    assert str(caught.value) == f"read_series: {name} must be a file that can be read; got {got} {cure}"


def test_no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"a\.csv must be a file that can be read; got Permission denied \(cure"):
        read_series("a.csv")


def test_any_path(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("0\n1\n")
    for path in (tmp_path / "a.csv", str(tmp_path / "a.csv"), os.path.join(".", "a.csv")):
        assert _values(read_series(path)) == [[[1]]]
    (tmp_path / "b.csv").write_text("0\n?\n")
    with pytest.raises(ValueError, match=rf"^read_series: {tmp_path}/b\.csv, line 2: "):
        read_series(tmp_path / "b.csv")


class _Bytes:
    def __fspath__(self) -> bytes:
        return b"a.csv"


@pytest.mark.parametrize(("path", "got"), [(b"a.csv", "b'a.csv'"), (None, "None"), (7, "7"), (_Bytes(), "<.*>")])
def test_not_a_path(path: Any, got: str) -> None:
    rule = r"path must be text or a path of text, such as a pathlib\.Path"
    with pytest.raises(ValueError, match=f"^read_series: {rule}; got {got}$"):
        read_series(path)


def test_errors_stay_short() -> None:
    """Whatever the length of the line at fault."""
    long = "y" * 100_000
    files = {
        "a.ts": [
            TS + f"{long}:1:walk\n",
            TS + f"1:1:{long}\n",
            f"@{long}\n",
            f"@missing {long}\n@data\n",
            f"@data {long}\n",
        ],
        "a.csv": [
            f"series,x\na,{long}\n",
            f"series,{long}\na,?\n",
            f"series,x\n{long},1\nb,1\n{long},1\n",
            f"series,time,time ({long})\na,1,1\n",
            f"{long};\n",
        ],
    }
    for name, contents in files.items():
        for content in contents:
            message = _error(name, content)
            assert "yyy...'" in message
            assert len(message) < 600
    digits = "1." + "0" * 100_000
    assert len(_error("a.csv", f"series,time,x\na,{digits}1,1\na,{digits},1\n")) < 600
    assert len(_error("a.csv", f'0\n"{long + long}"\n')) < 600  # more than the csv module takes in one cell
