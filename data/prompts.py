"""The prompts of the shipped corpora; `data/make.py` has them answered.

Two subjects, so that the donor's draft vocabulary and the new one really differ: the donor knows everyday life with a
little school science and first programs, the target is asked about computing and science. Held-out prompts use the
same forms of question on topics that no training prompt has.
"""

import itertools
from typing import Any

EVERYDAY = {
    "How do I cook {} at home? Give me the steps.": """
        lentil soup|roast chicken|apple pie|mushroom risotto|beef stew|banana bread|tomato sauce|fried rice|pancakes|
        vegetable curry|potato salad|grilled salmon|garlic noodles|pumpkin soup|chocolate cake|cheese omelette|fish tacos|
        baked beans|lamb chops|stuffed peppers|onion rings|rice pudding|corn bread|spinach lasagna|pea soup""",
    "Describe a visit to {} for a traveller.": """
        Paris|Kyoto|Cairo|Lisbon|Istanbul|Rome|Marrakesh|Edinburgh|Prague|Havana|Vienna|Bangkok|Athens|Mexico City|Dublin|
        Venice|Amsterdam|Jaipur|Reykjavik|Cape Town|Budapest|Seville|Petra|Hanoi|Quebec""",
    "How do I care for {} in my garden?": """
        roses|tomatoes|tulips|an apple tree|lavender|strawberries|a lawn in summer|basil|orchids|pumpkins|a vegetable bed|
        daffodils|a lemon tree|ferns|sunflowers|raspberries|carrots|a hedge|ivy|mint|cucumbers|lilies|garlic|peas|bees""",
    "Tell me about the life of {} in the wild.": """
        wolves|elephants|penguins|owls|dolphins|bears|foxes|eagles|whales|otters|lions|deer|hedgehogs|turtles|swans|bats|
        rabbits|crocodiles|beavers|giraffes|gorillas|salmon|storks|squirrels|kangaroos""",
    "Write a short story about {}.": """
        a lost umbrella|a sailor and a storm|two sisters at a market|a dog that found its way home|an old lighthouse|
        a birthday without guests|a train that never stopped|a farmer and a drought|a letter from grandmother|a winter wedding|
        a stolen violin|a child who feared the sea|a baker at dawn|a king without a crown|a night in the forest|
        a broken promise|a painter in love|a village fair|a soldier who came home|a garden behind a wall""",
    "What should I know about {} to stay healthy?": """
        sleeping well|walking every day|drinking water|eating vegetables|stretching|a cold|back pain|stress at work|
        sunburn|brushing teeth|too much sugar|headaches|running|allergies|eye strain|vitamins|swimming|fasting|posture|
        meditation""",
    "Explain what happened in {} and why people remember it.": """
        the French Revolution|the fall of Rome|the voyage of Columbus|the Black Death|the American Civil War|
        the First World War|the building of the pyramids|the Great Fire of London|the Russian Revolution|the Cold War|
        the Boston Tea Party|the sinking of the Titanic|the Renaissance|the Gold Rush|the Norman conquest|
        the fall of the Berlin Wall|the first Olympic Games|the Silk Road trade|the Irish famine|the moon landing""",
    "Give me advice about {}.": """
        a difficult neighbour|saving money|a first job interview|moving to a new city|raising a puppy|planning a wedding|
        a quarrel with a friend|choosing a gift|learning to dance|packing for a holiday|hosting a dinner|buying a used car|
        writing a thank you letter|a shy child|growing old|painting a room|cleaning a kitchen|a long flight|
        keeping a diary|making new friends""",
    "Compare {} and explain the differences.": """
        tea and coffee|cats and dogs|summer and winter|cities and villages|trains and planes|wool and cotton|
        butter and olive oil|football and rugby|novels and poems|mountains and beaches|pianos and guitars|
        apples and oranges|marriage and friendship|theatre and cinema|gold and silver|ships and boats|
        breakfast and dinner|rivers and lakes|bread and rice|painting and sculpture""",
    "Explain {} to a curious child.": """
        why the sky is blue|how plants grow|the seasons|a rainbow|the moon and the tides|fractions|how a car engine works|
        why we sleep|the water cycle|volcanoes|electricity at home|gravity|the five senses|counting money|dinosaurs|
        how bread rises|magnets|how the heart works|why ice floats|the planets|how a clock works|multiplication|germs|
        how birds fly|what a computer does""",
    "I am new to {}. What do I need to know?": """
        using a smartphone|email|online shopping|choosing a laptop|social media|internet safety|video calls|
        digital photography|passwords|searching the web|a home printer|spreadsheets|typing|streaming music|
        backing up files|wireless internet at home|a smart watch|online banking|video games|writing a blog""",
    "What are the advantages and disadvantages of {}?": """
        living in a city|working from home|owning a car|eating meat|solar panels at home|a large family|school uniforms|
        electric cars|travelling alone|living abroad|keeping a pet|fast food|public transport|homework|credit cards|
        buying a house|organic food|television|early retirement|learning two languages""",
    "How did {} change the way people live?": """
        the printing press|the steam engine|electric light|the telephone|the automobile|antibiotics|the railway|
        the airplane|television|the internet|the refrigerator|the plough|paper money|the wheel|vaccines|the camera|
        the bicycle|the radio|the washing machine|the compass""",
    "Show me a first program in Python that {}.": """
        prints a greeting|adds two numbers|asks for a name|counts from one to ten|draws a square of stars|
        lets me guess a number|keeps a shopping list|converts euros to dollars|tells if a number is even|
        prints a multiplication table|stores the names of my friends|rolls two dice|counts the letters of a name|
        finds the oldest person|keeps phone numbers in a dictionary|reads lines from a file|sorts names|
        computes my age|prints a calendar|adds up a bill|repeats a word|makes a quiz|counts down|draws a triangle|
        remembers a score|defines a class for a pet|checks a password|reverses a name|averages my grades|splits a sentence""",
    "Help me with my homework about {}.": """
        energy|cells|the solar system|atoms|forces and motion|acids at home|photosynthesis|electric current|the brain|
        density|equations with one unknown|angles|percentages|graphs of functions|averages|light|sound|chemical reactions|
        digestion|erosion|simple machines|temperature|fossils|decimals|area and volume|computers|the elements|symmetry|
        probability with dice|waves""",
    "Explain {} to someone who has never used one.": """
        a spreadsheet formula|a computer program|a web page|a computer virus|a network router|computer memory|an algorithm|
        artificial intelligence|a folder of files|a robot|a data table|a microchip|a sensor|a chat bot|a digital clock|
        a programming language|a web browser|a list in a program|a touch screen|a thermostat""",
}

COMPUTING = {
    "Write a Python function that {}. Explain how it works.": """
        reverses a string|checks if a number is prime|finds the largest item of a list|counts the vowels in a string|
        computes a factorial|removes duplicates from a list|merges two sorted lists|checks if a word is a palindrome|
        computes the Fibonacci sequence|finds the average of a list|converts Celsius to Fahrenheit|
        counts the words in a file|finds the greatest common divisor|flattens a nested list|reads a CSV file|
        computes the area of a circle|validates an email address|binary searches a sorted list|transposes a matrix|
        checks if two strings are anagrams|generates a password|computes compound interest|filters even numbers|
        computes the median of a list|finds the longest word|checks balanced parentheses|finds common elements of two lists|
        converts a decimal number to binary|counts character frequencies|computes the dot product of two vectors""",
    "Write a Python class for {} with methods and an example.": """
        a stack|a queue|a bank account|a linked list|a binary tree|a rectangle|a student record|a shopping cart|a graph|
        a timer|a matrix|a priority queue|a cache|an employee|a vector""",
    "Explain {} to a programmer and give an example.": """
        recursion|a hash table|object oriented programming|inheritance|binary search|dynamic programming|a lambda function|
        list comprehensions|exceptions|garbage collection|big O notation|a database index|version control|unit testing|
        an operating system|virtual memory|a compiler|a thread|a deadlock|a REST API|public key encryption|
        a neural network|gradient descent|overfitting|a decision tree|linear regression|a relational database|an SQL join|
        a regular expression|a pointer|a design pattern|a decorator|a generator|an interface|the stack and the heap|
        the TCP protocol|DNS|a web server|cloud computing|a container|continuous integration|a cache|load balancing|
        a race condition|functional programming|closures|a linked list|quicksort|merge sort|breadth first search""",
    "What is {} in mathematics? Show how it is used.": """
        a derivative|an integral|a matrix|a prime number|a vector|probability|a logarithm|the quadratic formula|
        the Pythagorean theorem|a limit|a function|standard deviation|a set|a polynomial|an eigenvalue|a complex number|
        the chain rule|a geometric series|modular arithmetic|a permutation|Bayes' theorem|the binomial theorem|
        a differential equation|the law of large numbers|a linear equation|an inequality|a proof by induction|
        a normal distribution|a determinant|a fraction""",
    "Explain the physics of {}.": """
        gravity|friction|an electric circuit|a magnet|sound waves|light refraction|kinetic energy|momentum|heat transfer|
        a pendulum|nuclear fusion|static electricity|a lever|pressure in fluids|black holes|radioactive decay|lasers|
        acceleration|semiconductors|the Doppler effect|thermodynamics|entropy|photons|electromagnetic induction|buoyancy|
        superconductors|orbits of planets|waves in water|quantum mechanics|special relativity""",
    "Describe {} as a chemistry teacher would.": """
        an acid and a base|the periodic table|a covalent bond|an ion|oxidation|a catalyst|the water molecule|combustion|
        a polymer|carbon|distillation|an isotope|salts|the mole|an electron shell|a chemical equation|corrosion|
        noble gases|metals|solubility|hydrogen bonds|a buffer solution|crystals|fermentation|electrolysis""",
    "How does {} work inside a computer?": """
        a processor|random access memory|a hard disk|a graphics card|a keyboard|a network card|an operating system kernel|
        a file system|a USB port|a boot loader|a scheduler|an interrupt|a register|a memory bus|a solid state drive|
        a device driver|a cache line|a power supply|a clock signal|a virtual machine|an assembler|a debugger|
        a screen|a sound card|a branch predictor""",
    "Write an SQL query that {} and explain each clause.": """
        lists all customers|counts orders per month|finds the highest salary|joins orders with customers|
        updates a price|finds duplicate emails|computes the average age|ranks students by score|
        creates a table of books|groups users by country""",
    "Compare {} for an engineer.": """
        arrays and linked lists|Python and C|SQL and NoSQL databases|threads and processes|TCP and UDP|
        compilers and interpreters|stacks and queues|HTTP and HTTPS|unit tests and integration tests|steel and aluminium|
        static and dynamic typing|recursion and iteration|Linux and Windows|analog and digital signals|
        supervised and unsupervised learning|alternating and direct current|symmetric and asymmetric encryption|
        voltage and current|CPU and GPU|RAM and ROM|petrol and electric motors|sensors and actuators|
        series and parallel circuits|waterfall and agile projects|monoliths and microservices""",
    "How do engineers use {}, and what are its limits?": """
        machine learning|a bridge truss|a wind turbine|a microcontroller|a control loop|finite element analysis|
        a satellite|radar|a battery|a heat exchanger|computer vision|a robot arm|fiber optics|an encryption key|
        a simulation|a solar cell|a transistor|a gear box|a pressure valve|statistics|a database|a nuclear reactor|
        a jet engine|sampling of signals|a search engine|a compression algorithm|a voltage regulator|error correction|
        a recommendation system|a digital filter""",
    "What are the key ideas of {}?": """
        information theory|evolution|computer security|graph theory|operating systems|cell biology|software testing|
        natural language processing|optimization|astronomy|data science|game theory|genetics|linear algebra|
        distributed systems|geology|calculus|cryptography|robotics|number theory|ecology|compiler design|
        computer networks|statistics|neuroscience|numerical analysis|human computer interaction|databases|topology|
        climate science""",
}

HELDOUT = {
    "Write a Python function that {}. Explain how it works.": """
        finds the smallest item of a list|computes the sum of squares|checks if a year is a leap year|
        counts the consonants in a string|sorts a list of words by length|removes spaces from a string|
        computes the least common multiple|checks if a list is sorted|finds the index of an item|
        converts kilometers to miles""",
    "Write a Python class for {} with methods and an example.": """
        a circle|a playlist|a parking lot|a hash map|a weather station""",
    "Explain {} to a programmer and give an example.": """
        polymorphism|a skip list|memory leaks|a state machine|dependency injection|
        a hash function|event driven programming|a message queue|a semaphore""",
    "What is {} in mathematics? Show how it is used.": """
        a ratio|a tangent line|a random variable|the golden ratio|a triangle|an exponent""",
    "Explain the physics of {}.": """
        a spring|a rainbow|electric current|inertia|a transformer|rockets""",
    "How does {} work inside a computer?": """
        a mouse|a motherboard|a floppy drive|an arithmetic logic unit""",
    "Write an SQL query that {} and explain each clause.": """
        finds the lowest price|counts employees per department|lists orders of last week|removes a table""",
    "Compare {} for an engineer.": """
        Java and Python|hash tables and trees|iron and copper|local and global variables""",
    "Describe {} as a chemistry teacher would.": """
        an alloy|evaporation|a proton|rust|a molecule""",
    "How do engineers use {}, and what are its limits?": """
        a drone|a pump|a laser|a spreadsheet|a capacitor|a conveyor belt""",
    "What are the key ideas of {}?": """
        set theory|operations research|electronics|medicine|algorithms""",
}

AGAIN = {
    "What do beginners get wrong about {}?": (
        "What should I know about {} to stay healthy?",
        "Give me advice about {}.",
    ),
    "Name three facts about {}.": (
        "Tell me about the life of {} in the wild.",
        "Describe a visit to {} for a traveller.",
    ),
    "What do I need to buy for {}?": ("How do I cook {} at home? Give me the steps.",),
    "Why does {} matter to people today?": (
        "Explain what happened in {} and why people remember it.",
        "How did {} change the way people live?",
    ),
    "How would you explain {} to a grandmother?": (
        "Explain {} to someone who has never used one.",
        "Explain {} to a curious child.",
    ),
    "Give me one tip about {}.": (
        "How do I care for {} in my garden?",
        "I am new to {}. What do I need to know?",
    ),
    "When should a programmer use {}, and when not?": ("Explain {} to a programmer and give an example.",),
    "Define {} and give one example.": (
        "What is {} in mathematics? Show how it is used.",
        "Explain the physics of {}.",
    ),
    "What is {} good for in practice?": (
        "Describe {} as a chemistry teacher would.",
        "What are the key ideas of {}?",
    ),
    "What can go wrong with {}?": (
        "How does {} work inside a computer?",
        "How do engineers use {}, and what are its limits?",
    ),
    "Which tests would you write for a Python function that {}?": (
        "Write a Python function that {}. Explain how it works.",
    ),
}
"""Forms that are asked about the topics of others."""

BRIEF = ("Be brief.", "Answer in two or three sentences.")
"""So that a small model comes to an end: at its own pace every second answer is longer than a corpus for a laptop."""
GO_ON = (
    "Now say that in one sentence.",
    "Give me one more example.",
    "Why does that matter?",
    "What is its main limit?",
)
EVERY = 4  # the fourth chat goes on with a second turn

CORPORA = {"donor": EVERYDAY, "train": COMPUTING, "heldout": HELDOUT}


def topics(forms: dict[str, str]) -> set[str]:
    """Every topic of `forms`."""
    return {" ".join(topic.split()) for line in forms.values() for topic in line.split("|")}


def compose(forms: dict[str, str]) -> list[tuple[str, str]]:
    """(source, prompt) of every form with each of its topics, forms in turn, so that a prefix of the list mixes them."""
    columns = [
        [(form.replace("{}", "…"), form.format(" ".join(topic.split()))) for topic in line.split("|")]
        for form, line in forms.items()
    ]
    return [prompt for row in itertools.zip_longest(*columns) for prompt in row if prompt is not None]


def chat(number: int, prompt: str) -> list[dict[str, str]]:
    """The messages of one chat, its answers empty."""
    asked = [f"{prompt} {BRIEF[number % len(BRIEF)]}"]
    if number % EVERY == EVERY - 1:
        asked.append(GO_ON[number // EVERY % len(GO_ON)])
    turns = [({"role": "user", "content": text}, {"role": "assistant", "content": ""}) for text in asked]
    return [message for turn in turns for message in turn]


def again(forms: dict[str, str]) -> dict[str, str]:
    """The forms of `AGAIN`, with the topics that `forms` has for them."""
    found = {form: "|".join(forms[other] for other in others if other in forms) for form, others in AGAIN.items()}
    return {form: line for form, line in found.items() if line}


TINY = ("tiny", "kimi-tiny")
"""Profiles whose target is fitted to the generated world of `redraft.target.tiny`."""


def tiny() -> dict[str, list[tuple[str, str]]]:
    """Questions of that world; every fourth question on tools is held out."""
    from redraft.target.tiny import chats

    tools = [question for question, _ in chats("tools")]
    return {
        "donor": [("animals", question) for question, _ in chats("animals")],
        "train": [("tools", question) for number, question in enumerate(tools) if number % 4 != number // 4 % 4],
        "heldout": [("tools", question) for number, question in enumerate(tools) if number % 4 == number // 4 % 4],
    }


def rows(profile: str) -> dict[str, list[dict[str, Any]]]:
    """Rows to answer, by split."""
    corpora = (
        tiny() if profile in TINY else {name: compose(forms) + compose(again(forms)) for name, forms in CORPORA.items()}
    )
    both = topics(HELDOUT) & topics(COMPUTING)
    assert not both, f"held-out topics that are trained on: {both}"
    found = {}
    for name, prompts in corpora.items():
        assert len(set(prompts)) == len(prompts), name
        messages = [
            [{"role": "user", "content": prompt}] if profile in TINY else chat(number, prompt)
            for number, (_, prompt) in enumerate(prompts)
        ]
        found[name] = [
            {"id": f"{name}-{number:03d}", "source": source, "messages": messages[number]}
            for number, (source, _) in enumerate(prompts)
        ]
    return found
