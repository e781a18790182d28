r"""Answers that are the same and answers that are not, each pair checked by hand: one a line, ` ~ ` between."""

EQUAL = r"""
70 ~ 070
7 ~ 007
0 ~ 000
204 ~ 204.0
-5 ~ −5
5 ~ +5
5 ~ 5.
.5 ~ 0.5
0.5 ~ \frac{1}{2}
0.5 ~ 1/2
2.50 ~ 2.5
-0.25 ~ -\frac14
1/2 ~ \frac12
\frac{1}{2} ~ \dfrac{1}{2}
\frac{1}{2} ~ \tfrac12
\frac1{72} ~ \frac{1}{72}
\frac{14}3 ~ \frac{14}{3}
-\frac{1}{2} ~ \frac{-1}{2}
-\frac{1}{2} ~ \frac{1}{-2}
\frac{2}{4} ~ \frac{1}{2}
1\frac{1}{2} ~ \frac{3}{2}
1 1/2 ~ 1.5
-1\frac12 ~ -1.5
\frac{a}{b} ~ a/b
\frac{\pi}{2} ~ \pi/2
\frac{2\sqrt{3}}{3} ~ 2\sqrt3/3
\frac{x+1}{2} ~ \dfrac{x + 1}{2}
\sqrt{3} ~ \sqrt3
\sqrt{2} ~ √2
\sqrt{10} ~ sqrt(10)
2\sqrt{3} ~ 2 \cdot \sqrt{3}
\sqrt[3]{2} ~ \sqrt[3]{ 2 }
1,234 ~ 1234
1{,}234{,}567 ~ 1234567
11,\! 111,\! 100 ~ 11111100
10,000.5 ~ 10000.5
10\,000 ~ 10000
$42$ ~ 42
\(42\) ~ 42
\$18.90 ~ 18.9
$\$32,\!348$ ~ 32348
50\% ~ 50
12.5% ~ 12.5
90^\circ ~ 90
90^{\circ} ~ 90
45° ~ 45
30\text{ degrees} ~ 30
120 degrees ~ 120
5\text{ cm} ~ 5
5\text{cm} ~ 5
12\mbox{ inches}^2 ~ 12
20\text{ cm}^{2} ~ 20
864 \mbox{ inches}^2 ~ 864
15 cm ~ 15
6 square units ~ 6
18 feet ~ 18
\frac{1}{2}\text{ hour} ~ \frac{1}{2}
10\textrm{ dollars} ~ 10
\text{Evelyn} ~ Evelyn
\text{even} ~ Even
\textbf{Navin} ~ Navin
\text{(C)} ~ C
(B) ~ \text{B}
\mathrm{east} ~ \text{east}
x=5 ~ 5
k = -3 ~ -3
y = 2x + 3 ~ 2x+3
f(x) = x^2 ~ x^2
x \in [1,2] ~ [1, 2]
\theta = \frac{\pi}{4} ~ \frac\pi4
(1,2) ~ (1, 2)
\left(3, \frac{\pi}{2}\right) ~ (3, \pi/2)
\left( -\infty, 2 \right] ~ (-\infty,2]
(2,+\infty) ~ (2, \infty)
(2,∞) ~ (2,\infty)
(-\infty,-1)\cup(1,\infty) ~ (1,\infty) \cup (-\infty,-1)
[0,1) ∪ (2,3] ~ [0, 1)\cup(2, 3]
\{1,2,3\} ~ \{3, 2, 1\}
\left\{1,2\right\} ~ \lbrace 2,1 \rbrace
\{0.5, 2\} ~ \{2, \frac{1}{2}\}
1,-2 ~ -2, 1
1, 2 ~ 1,2
3 \text{ and } 5 ~ 3, 5
3 \text{ or } 5 ~ 5, 3
2, 3, and 5 ~ 2,3,5
100,200 ~ 100, 200
3\pm\sqrt{2} ~ 3+\sqrt2, 3-\sqrt2
\pm 4 ~ 4, -4
\emptyset ~ \varnothing
x^2+1 ~ x^{2} + 1
x**2 ~ x^2
2\times 3 ~ 2 \cdot 3
2*x ~ 2x
\pi x ~ \pi \cdot x
2\pi ~ 2π
11111_2 ~ 11111_{2}
10^{-3} ~ 10^{-3}
x \le 5 ~ x \leq 5
x >= 2 ~ x \geq 2
\begin{pmatrix}1\\2\end{pmatrix} ~ \begin{bmatrix} 1 \\ 2 \end{bmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \\ \end{pmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\left(\frac{3}{5},\frac{8}{3}\right] ~ (3/5, 8/3]
p - q ~ p-q
6 - 5i ~ 6-5i
\displaystyle \frac{3}{4} ~ 0.75
{5} ~ 5
\begin{pmatrix} 1 \\[6pt] 2 \end{pmatrix} ~ \begin{pmatrix}1\\2\end{pmatrix}
\begin{pmatrix} 3 & -1 \\[0.5em] 2 & 4 \\ [2 mm] \end{pmatrix} ~ \begin{pmatrix}3&-1\\2&4\end{pmatrix}
\begin{bmatrix}\dfrac{1}{2}\\[6pt]\dfrac{3}{4}\end{bmatrix} ~ \begin{pmatrix}1/2\\3/4\end{pmatrix}
\begin{pmatrix}-1/3\\2/3\end{pmatrix} ~ \begin{pmatrix} -\frac{1}{3} \\ \frac{2}{3} \end{pmatrix}
\begin{pmatrix}1/5&2/5\\-2/5&4/5\end{pmatrix} ~ \begin{pmatrix}\frac15&\frac25\\-\frac25&\frac45\end{pmatrix}
8\pi \text{ cm} ~ 8\pi
8\pi\text{ square units} ~ 8\pi
8\pi\text{ cm}^2 ~ 8\pi
8π cm ~ 8\pi
12\pi cubic inches ~ 12\pi
\frac{\pi}{4} radians ~ \frac\pi4
(2+\sqrt{3}) cm ~ (2+\sqrt3)
\tan(x) ~ \tan x
\tan (x) ~ \tan{x}
\sin(2x) ~ \sin 2x
\sin^2(x) ~ \sin^{2} x
\sin(x)\cos(x) ~ \sin x \cos x
\cos(\theta) ~ \cos \theta
\log_2(8) ~ \log_{2} 8
y = 3\cos(2x) + 1 ~ 3\cos 2x+1
2.5\times10^3 ~ 2500
2.5 \times 10^{3} ~ 2,500
-1.2 \cdot 10^{-2} ~ -0.012
6 \times 10^{4} ~ 60000
10^3 ~ 1000
3 * 10^2 ~ 300
x+1 ~ 1+x
-x + y ~ y - x
x^2+2x+1 ~ 1 + 2x + x^2
3 - 2i ~ -2i+3
\frac{1+\sqrt{5}}{2} ~ \frac{\sqrt5+1}{2}
(x+1)(x-2) ~ (1+x)(-2+x)
\sqrt{x+y} - 1 ~ -1 + \sqrt{y+x}
(1+\sqrt{2}, 3) ~ (\sqrt2+1, 3)
\{x+1, y\} ~ \{y, 1+x\}
2^{n+1}-1 ~ -1+2^{1+n}
x \leq 1+y ~ x \leq y+1
17^{\text{th}} ~ 17
17^\text{th} ~ 17th
21^{st} ~ 21\textsuperscript{st}
22\text{nd} ~ 22^{\mathrm{nd}}
3^{\rm rd} ~ 3rd
17^{\small\text{th}} ~ 17
2\!:\!15 \text{ p.m.} ~ 2:15 PM
2\!:\!15 \text{ p.m.} ~ 2:15
2:15\,\mathrm{p.m.} ~ 2:15 p.m.
2:15 \text{ p.m.} ~ 02:15 pm
7 \text{ a.m.} ~ 7:00 AM
10\hspace{1mm}000 ~ 10\mkern3mu 000
10\thinspace000 ~ 10\negthinspace 000
10 000 ~ 10​000
"""

UNEQUAL = r"""
70 ~ 71
70 ~ 7
070 ~ 700
204 ~ 2040
5 ~ -5
0.5 ~ 0.05
\frac{1}{2} ~ \frac{2}{1}
\frac{1}{2} ~ -\frac{1}{2}
\frac{1}{2} ~ 12
1\frac{1}{2} ~ \frac{1}{2}
1\frac12 ~ \frac{11}{2}
0.333 ~ \frac{1}{3}
\frac{1}{0} ~ \frac{2}{0}
\sqrt{3} ~ 3
\sqrt{3} ~ \sqrt{2}
2\sqrt{3} ~ 3\sqrt{2}
\sqrt[3]{2} ~ \sqrt{2}
2^{10} ~ 2^1 0
x^2 ~ x^3
x^2 ~ x_2
x+1 ~ x-1
2x ~ x
2 \cdot 3 ~ 23
1,234 ~ 234
1,234 ~ 12,34
(1,2) ~ (2,1)
(1,2) ~ [1,2]
(1,2] ~ [1,2)
(1,2) ~ 1,2
(1,234) ~ 1234
(1,2,3) ~ (1,2)
(-\infty,2) ~ (-\infty,2]
(-\infty,2) ~ (2,\infty)
(1,2)\cup(3,4) ~ (1,2)
(1,2)\cup(3,4) ~ (1,2)\cup(3,5)
\{1,2\} ~ \{1,3\}
\{1,2\} ~ \{1,2,3\}
\{1,1,2\} ~ \{1,2,2\}
1,-2 ~ 1,2
3\pm\sqrt{2} ~ 3+\sqrt2
\pm 4 ~ 4
\text{Evelyn} ~ \text{Evelin}
\text{(C)} ~ \text{(D)}
A ~ a
\text{even} ~ \text{odd}
x=5 ~ x=6
y=2x+3 ~ 2x-3
\begin{pmatrix}1\\2\end{pmatrix} ~ \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} ~ \begin{pmatrix}1&2\end{pmatrix}
\pi ~ 3.14
2\pi ~ \pi
\infty ~ -\infty
11111_2 ~ 11111_3
6-5i ~ 6+5i
x \leq 5 ~ x \geq 5
\emptyset ~ 0
\begin{pmatrix} 1 \\[6pt] 2 \end{pmatrix} ~ \begin{pmatrix}1\\3\end{pmatrix}
\begin{pmatrix} 1 \\[6pt] 2 \end{pmatrix} ~ \begin{pmatrix}1\\6\\2\end{pmatrix}
\begin{pmatrix}1\\ [2] \end{pmatrix} ~ \begin{pmatrix}1\\ \end{pmatrix}
\begin{pmatrix}-1/3\\2/3\end{pmatrix} ~ \begin{pmatrix}\frac13\\\frac23\end{pmatrix}
\begin{pmatrix}1/32/3\end{pmatrix} ~ \begin{pmatrix}1/3\\2/3\end{pmatrix}
\begin{pmatrix}x+1\\2\end{pmatrix} ~ \begin{pmatrix}2\\1+x\end{pmatrix}
8\pi \text{ cm} ~ 8
8\pi r ~ 8\pi
8\pi h cm ~ 8\pi
\tan(x) ~ \tan(y)
\tan(x) ~ \tan x^2
\sin(x)y ~ \sin xy
\sin(2x) ~ 2\sin(x)
\sin^2(x) ~ \sin(x^2)
\sin(x)/2 ~ \sin x/3
\log_2(8) ~ \log_3(8)
\cot x ~ \cos x
2.5\times10^3 ~ 250
2.5\times10^3 ~ 25000
2.5\times10^{-3} ~ 2500
2.5\times10^3 ~ 2.5\times10^4
-10^2 ~ 100
10^{400} ~ 10^{401}
x+1 ~ x-1
x+1 ~ -1-x
x-y ~ y-x
2-3 ~ 3-2
3-2i ~ 2i-3
\frac{1+\sqrt{5}}{2} ~ \frac{1-\sqrt{5}}{2}
\frac{x+1}{y} ~ \frac{y}{x+1}
x^{a+b} ~ x^a+b
x^{-1}+2 ~ 2^{-1}+x
2(x+1) ~ 2x+1
|x+1|-|y| ~ |x-|y|+1|
\sum_{k}k+1 ~ 1+\sum_{k}k
(1+x, 2) ~ (2, x+1)
a/b+c ~ a/c+b
x=1+y ~ 1=x+y
x:1+2 ~ 2+x:1
17^{\text{th}} ~ 18th
x^{th} ~ x
n^2d+2nd ~ n^2d+2
2:15 a.m. ~ 2:15 p.m.
2:15 p.m. ~ 2:16 p.m.
2:15 p.m. ~ 3:15 p.m.
2:15 p.m. ~ 2 p.m.
2:00 ~ 2
"""


def parse_pairs(text: str) -> list[tuple[str, str]]:
    return [tuple(line.split(" ~ ")) for line in text.strip().splitlines()]
